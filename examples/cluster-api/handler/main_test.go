package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	runtimecatalog "sigs.k8s.io/cluster-api/api/runtime/catalog"
	hooksv1 "sigs.k8s.io/cluster-api/api/runtime/hooks/v1alpha1"
)

const namespace, name = "default", "cp-abcde"

// TestNode upgrades a node through the hooks, as Cluster API's controllers call them: scripts/cluster.sh runs it.
// CAPI_RUN is the program that stands for `--run COMMAND…`.
func TestNode(t *testing.T) {
	run, from, to := os.Getenv("CAPI_RUN"), os.Getenv("CAPI_FROM"), os.Getenv("CAPI_TO")
	if run == "" {
		t.Skip("needs a node in CAPI_RUN, CAPI_FROM and CAPI_TO: scripts/cluster.sh has one")
	}
	c := start(t, run)
	c.discover(t)
	for _, version := range []string{"v1.1.0", "v1.999.0", to + ";reboot", "latest", ""} {
		c.expect(t, c.update(t, version), hooksv1.ResponseStatusFailure, 0)
	}
	if patch := c.canUpdate(t, from, to).MachinePatch; string(patch.Patch) != `{"spec":{"version":"`+to+`"}}` {
		t.Fatalf("CanUpdateMachine: %s", patch.Patch)
	}
	// A controller that is started again asks at once, too.
	answers := make(chan *hooksv1.UpdateMachineResponse)
	for range 2 {
		go func() { answers <- c.update(t, to) }()
	}
	for range 2 {
		c.expect(t, <-answers, hooksv1.ResponseStatusSuccess, retryAfterSeconds)
	}
	// Nothing else may begin meanwhile.
	c.expect(t, c.update(t, to+"0"), hooksv1.ResponseStatusFailure, 0)
	said := ""
	for {
		answer := c.update(t, to)
		if answer.Message != said {
			said = answer.Message
			t.Logf("UpdateMachine: %s, %s", answer.Status, said)
		}
		if answer.Status != hooksv1.ResponseStatusSuccess {
			t.Fatal("the update failed")
		}
		if answer.RetryAfterSeconds == 0 {
			break
		}
		time.Sleep(time.Duration(answer.RetryAfterSeconds) * time.Second)
	}
	c.expect(t, c.update(t, to), hooksv1.ResponseStatusSuccess, 0)
}

// What berth-upgrade may say, and what Cluster API is answered.
func TestAnswers(t *testing.T) {
	for _, c := range []struct {
		said    string
		status  int
		patched bool
		update  hooksv1.ResponseStatus
		retry   int32
	}{
		{"can: v1.36.3", 0, true, hooksv1.ResponseStatusFailure, 0},
		{"done: v1.36.3", 0, false, hooksv1.ResponseStatusSuccess, 0},
		{"noise\ndone: v1.36.3", 0, false, hooksv1.ResponseStatusSuccess, 0},
		// Exit status 0 alone is not enough, and neither is the line alone.
		{"", 0, false, hooksv1.ResponseStatusFailure, 0},
		{"done: v1.36.2", 0, false, hooksv1.ResponseStatusFailure, 0},
		{"done: v1.36.3\nnoise", 0, false, hooksv1.ResponseStatusFailure, 0},
		{"done: v1.36.3", 1, false, hooksv1.ResponseStatusFailure, 0},
		{"done: v1.36.3", 3, false, hooksv1.ResponseStatusFailure, 0},
		{"in progress: kubeadm", 3, false, hooksv1.ResponseStatusSuccess, retryAfterSeconds},
		{"in progress: kubeadm", 0, false, hooksv1.ResponseStatusFailure, 0},
		{"refused: not the only one", 69, false, hooksv1.ResponseStatusFailure, 0},
		{"failed: status 75", 1, false, hooksv1.ResponseStatusFailure, 0},
		{"in progress: kubeadm", 75, false, hooksv1.ResponseStatusFailure, 0},
		{"ssh: connection refused", 255, false, hooksv1.ResponseStatusFailure, 0},
	} {
		t.Run(fmt.Sprintf("%q,%d", c.said, c.status), func(t *testing.T) {
			controller := start(t, script(t, fmt.Sprintf("printf '%%s\\n' '%s'; exit %d", c.said, c.status)))
			can := controller.canUpdate(t, "v1.35.4", "v1.36.3")
			if can.MachinePatch.IsDefined() != c.patched || can.BootstrapConfigPatch.IsDefined() || can.InfrastructureMachinePatch.IsDefined() {
				t.Errorf("CanUpdateMachine: %+v", can)
			}
			// Only a refusal of the node leaves the machine to Cluster API. What is not known is asked again.
			if replaced := can.Status == hooksv1.ResponseStatusSuccess && !c.patched; replaced != (c.status == 69) {
				t.Errorf("CanUpdateMachine: %+v", can)
			}
			controller.expect(t, controller.update(t, "v1.36.3"), c.update, c.retry)
		})
	}
}

// Nothing of these requests gets to the node.
func TestRefusedRequests(t *testing.T) {
	reached := filepath.Join(t.TempDir(), "reached")
	c := start(t, script(t, "touch "+reached+"; echo can: v1.36.3; echo done: v1.36.3"))
	for _, version := range []string{"", "v1.36", "1.36.3", "v1.36.3\n", "v1.36.3 --yes", "v1.36.3;id", "$(id)", "v1.36.3-rc.0", "v2.0.0", "v1.036.3"} {
		c.expect(t, c.update(t, version), hooksv1.ResponseStatusFailure, 0)
	}
	for _, change := range []func(*clusterv1.Machine){
		func(m *clusterv1.Machine) { m.Name = "cp-other" },
		func(m *clusterv1.Machine) { m.Namespace = "other" },
		func(m *clusterv1.Machine) { m.Labels = nil },
	} {
		request := &hooksv1.UpdateMachineRequest{Desired: hooksv1.UpdateMachineRequestObjects{Machine: machine("v1.36.3")}}
		change(&request.Desired.Machine)
		answer := &hooksv1.UpdateMachineResponse{}
		c.call(t, hooksv1.UpdateMachine, "update-machine", request, answer)
		c.expect(t, answer, hooksv1.ResponseStatusFailure, 0)
	}
	for _, pair := range [][2]string{{"v1.35.4", "v1.37.0"}, {"v1.36.3", "v1.36.3"}, {"v1.36.3", "v1.36.2"}, {"v1.36.3", "v1.35.9"}, {"", "v1.36.3"}} {
		if can := c.canUpdate(t, pair[0], pair[1]); can.MachinePatch.IsDefined() {
			t.Errorf("%v: %+v", pair, can)
		}
	}
	set := &hooksv1.CanUpdateMachineSetResponse{}
	c.call(t, hooksv1.CanUpdateMachineSet, "can-update-machine-set", &hooksv1.CanUpdateMachineSetRequest{}, set)
	if set.Status != hooksv1.ResponseStatusSuccess || set.MachineSetPatch.IsDefined() {
		t.Errorf("CanUpdateMachineSet: %+v", set)
	}
	for _, body := range []string{"", "{", "null", "{}", `{"apiVersion":"hooks.runtime.cluster.x-k8s.io/v1alpha1","kind":"CanUpdateMachineRequest"}`,
		"{" + strings.Repeat(" ", maxRequest) + "}"} {
		answer := &hooksv1.UpdateMachineResponse{}
		if err := json.Unmarshal(c.post(t, hooksv1.UpdateMachine, "update-machine", []byte(body)), answer); err != nil {
			t.Fatal(err)
		}
		c.expect(t, answer, hooksv1.ResponseStatusFailure, 0)
	}
	if _, err := os.Stat(reached); err == nil {
		t.Error("a request got to the node")
	}
	c.client.Transport.(*http.Transport).TLSClientConfig.Certificates = nil
	c.client.CloseIdleConnections()
	if _, err := c.client.Post(c.url, "application/json", nil); err == nil {
		t.Error("a client without a certificate was answered")
	}
}

func TestDiscovery(t *testing.T) { start(t, "/bin/true").discover(t) }

func TestWrongOptions(t *testing.T) {
	for _, arguments := range [][]string{{}, {"--run"}, {"--run", "true"}, {"--machine", "cp", "--run", "true"}, {"--machine", "a/b"},
		{"--machine", "a/b", "--run", "true"}, {"--machine", "a/b", "ssh", "--run", "true"}} {
		if err := serve(arguments, nil); err == nil {
			t.Errorf("%v", arguments)
		}
	}
}

// controller calls hooks as Cluster API does (internal/runtime/client of v1.14.2).
type controller struct {
	url    string
	client *http.Client
}

// start starts the handler with its own options, and certificates of one CA for both sides.
func start(t *testing.T, run string) *controller {
	directory := t.TempDir()
	pool, pair := certificates(t, directory)
	file := func(name string) string { return filepath.Join(directory, name) }
	started, ended := make(chan net.Addr, 1), make(chan error, 1)
	go func() {
		ended <- serve([]string{"--machine", namespace + "/" + name, "--listen", "127.0.0.1:0", "--tls-cert", file("pair.crt"),
			"--tls-key", file("pair.key"), "--client-ca", file("ca.crt"), "--run", run}, started)
	}()
	select {
	case err := <-ended:
		t.Fatal(err)
		return nil
	case address := <-started:
		return &controller{"https://" + address.String(), &http.Client{Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}, ServerName: "handler"},
		}}}
	}
}

func certificates(t *testing.T, directory string) (*x509.CertPool, tls.Certificate) {
	write := func(name, kind string, der []byte) []byte {
		text := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
		if err := os.WriteFile(filepath.Join(directory, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
		return text
	}
	authority := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), DNSNames: []string{"handler"}, NotAfter: authority.NotAfter,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	authorityKey, leafKey := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)), must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(write("ca.crt", "CERTIFICATE", must(x509.CreateCertificate(rand.Reader, authority, authority, authorityKey.Public(), authorityKey))))
	certificate := write("pair.crt", "CERTIFICATE", must(x509.CreateCertificate(rand.Reader, leaf, authority, leafKey.Public(), authorityKey)))
	key := write("pair.key", "PRIVATE KEY", must(x509.MarshalPKCS8PrivateKey(leafKey)))
	return pool, must(tls.X509KeyPair(certificate, key))
}

func script(t *testing.T, text string) string {
	file := filepath.Join(t.TempDir(), "berth-upgrade")
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return file
}

// machine is what Cluster API sends of one: names, labels and the spec, no status.
func machine(version string) clusterv1.Machine {
	return clusterv1.Machine{
		TypeMeta: metav1.TypeMeta{APIVersion: clusterv1.GroupVersion.String(), Kind: "Machine"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{
			clusterv1.ClusterNameLabel: "test", clusterv1.MachineControlPlaneLabel: "",
		}},
		Spec: clusterv1.MachineSpec{ClusterName: "test", Version: version},
	}
}

var (
	infrastructure = runtime.RawExtension{Raw: []byte(`{"apiVersion":"infrastructure.cluster.x-k8s.io/v1beta2","kind":"TestMachine","spec":{}}`)}
	bootstrap      = runtime.RawExtension{Raw: []byte(`{"apiVersion":"bootstrap.cluster.x-k8s.io/v1beta2","kind":"KubeadmConfig","spec":{}}`)}
)

func (c *controller) update(t *testing.T, version string) *hooksv1.UpdateMachineResponse {
	answer := &hooksv1.UpdateMachineResponse{}
	c.call(t, hooksv1.UpdateMachine, "update-machine", &hooksv1.UpdateMachineRequest{Desired: hooksv1.UpdateMachineRequestObjects{
		Machine: machine(version), InfrastructureMachine: infrastructure, BootstrapConfig: bootstrap,
	}}, answer)
	return answer
}

func (c *controller) canUpdate(t *testing.T, from, to string) *hooksv1.CanUpdateMachineResponse {
	objects := func(version string) hooksv1.CanUpdateMachineRequestObjects {
		return hooksv1.CanUpdateMachineRequestObjects{Machine: machine(version), InfrastructureMachine: infrastructure, BootstrapConfig: bootstrap}
	}
	answer := &hooksv1.CanUpdateMachineResponse{}
	c.call(t, hooksv1.CanUpdateMachine, "can-update-machine", &hooksv1.CanUpdateMachineRequest{Current: objects(from), Desired: objects(to)}, answer)
	return answer
}

// discover checks what Cluster API checks of a discovery.
func (c *controller) discover(t *testing.T) {
	answer := &hooksv1.DiscoveryResponse{}
	c.call(t, hooksv1.Discovery, "", &hooksv1.DiscoveryRequest{}, answer)
	var hooks []string
	for _, handler := range answer.Handlers {
		hooks = append(hooks, handler.RequestHook.Hook)
		if len(validation.IsDNS1123Label(handler.Name)) > 0 || *handler.TimeoutSeconds > 30 || *handler.FailurePolicy != hooksv1.FailurePolicyFail ||
			handler.RequestHook.APIVersion != hooksv1.GroupVersion.String() {
			t.Errorf("%+v", handler)
		}
	}
	slices.Sort(hooks)
	if !slices.Equal(hooks, []string{"CanUpdateMachine", "CanUpdateMachineSet", "UpdateMachine"}) {
		t.Errorf("%v", hooks)
	}
}

func (c *controller) expect(t *testing.T, answer *hooksv1.UpdateMachineResponse, status hooksv1.ResponseStatus, retry int32) {
	t.Helper()
	if answer.Status != status || answer.RetryAfterSeconds != retry {
		t.Fatalf("UpdateMachine: %s, retry after %d s: %s", answer.Status, answer.RetryAfterSeconds, answer.Message)
	}
}

func (c *controller) call(t *testing.T, hook runtimecatalog.Hook, name string, request, response runtime.Object) {
	request.GetObjectKind().SetGroupVersionKind(must(catalog.Request(must(catalog.GroupVersionHook(hook)))))
	if err := json.Unmarshal(c.post(t, hook, name, must(json.Marshal(request))), response); err != nil {
		t.Error(err)
	}
}

func (c *controller) post(t *testing.T, hook runtimecatalog.Hook, name string, body []byte) []byte {
	url := c.url + runtimecatalog.GVHToPath(must(catalog.GroupVersionHook(hook)), name) + "?timeout=30s"
	answer, err := c.client.Post(url, "", bytes.NewReader(body))
	if err != nil {
		t.Error(err)
		return nil
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		t.Errorf("%s: %s", url, answer.Status)
	}
	return must(io.ReadAll(answer.Body))
}
