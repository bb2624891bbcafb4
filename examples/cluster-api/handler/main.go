// Command handler answers Cluster API's hooks for in-place updates for one Machine: the only control-plane
// machine of its cluster. It hands a version, and nothing else of a request, to a command that runs
// berth-upgrade on the machine, and answers what berth-upgrade says there.
//
// It claims the version of the Machine. For every other difference it has no patch, so Cluster API replaces the
// machine. "Done" is berth-upgrade's answer about the state of the node; the handler keeps no state of its own.
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	runtimecatalog "sigs.k8s.io/cluster-api/api/runtime/catalog"
	hooksv1 "sigs.k8s.io/cluster-api/api/runtime/hooks/v1alpha1"
)

const (
	// Largest request. The objects that a request describes have to fit into etcd, which takes 1.5 MiB.
	maxRequest = 4 << 20
	// Cluster API waits for at most 30 s, and the handler gives up before.
	hookTimeoutSeconds = 30
	commandTimeout     = 25 * time.Second
	retryAfterSeconds  = 10
	// Exit statuses of berth-upgrade.
	statusOK, statusInProgress, statusRefused = 0, 3, 69
)

var (
	catalog        = runtimecatalog.New()
	versionPattern = regexp.MustCompile(`^v1\.(0|[1-9][0-9]{0,2})\.(0|[1-9][0-9]{0,2})$`)
)

func init() {
	if err := hooksv1.AddToCatalog(catalog); err != nil {
		panic(err)
	}
}

func main() {
	if err := serve(os.Args[1:], nil); err != nil {
		log.Fatal(err)
	}
}

// handler knows one Machine, and the command that reaches its node.
type handler struct {
	// Namespace and name of the Machine.
	machine string
	// Command to which an action and a version are appended.
	command []string
}

// serve answers hooks until it fails. It sends the address that it listens on, if started is not nil.
func serve(arguments []string, started chan<- net.Addr) error {
	var h handler
	if at := slices.Index(arguments, "--run"); at >= 0 {
		arguments, h.command = arguments[:at], arguments[at+1:]
	}
	flags := flag.NewFlagSet("handler", flag.ContinueOnError)
	flags.StringVar(&h.machine, "machine", "", "`NAMESPACE/NAME` of the Machine")
	listen := flags.String("listen", ":9443", "`address` for the controllers")
	certificate := flags.String("tls-cert", "", "`file` with the server's certificate")
	key := flags.String("tls-key", "", "`file` with its key")
	clientCA := flags.String("client-ca", "", "`file` with the CA of the controllers' client certificate")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() > 0 || len(h.command) == 0 || strings.Count(h.machine, "/") != 1 {
		return errors.New("usage: handler --machine NAMESPACE/NAME --tls-cert FILE --tls-key FILE --client-ca FILE [--listen ADDRESS] --run COMMAND…")
	}
	config, err := tlsConfig(*certificate, *key, *clientCA)
	if err != nil {
		return err
	}
	listener, err := tls.Listen("tcp", *listen, config)
	if err != nil {
		return err
	}
	if started != nil {
		started <- listener.Addr()
	}
	server := http.Server{
		Handler:           h.routes(),
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       hookTimeoutSeconds * time.Second,
		WriteTimeout:      2 * hookTimeoutSeconds * time.Second,
		MaxHeaderBytes:    16 << 10,
	}
	return server.Serve(listener)
}

// tlsConfig takes only clients that the CA knows: whoever reaches the handler could upgrade the node.
func tlsConfig(certificate, key, clientCA string) (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(certificate, key)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	authorities, err := os.ReadFile(clientCA)
	if err != nil {
		return nil, fmt.Errorf("--client-ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(authorities) {
		return nil, fmt.Errorf("--client-ca: no certificate in %s", clientCA)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{pair},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    pool,
	}, nil
}

func (h *handler) routes() http.Handler {
	mux := http.NewServeMux()
	var handlers []hooksv1.ExtensionHandler
	for name, hook := range map[string]runtimecatalog.Hook{
		"can-update-machine":     hooksv1.CanUpdateMachine,
		"can-update-machine-set": hooksv1.CanUpdateMachineSet,
		"update-machine":         hooksv1.UpdateMachine,
	} {
		gvh := route(mux, h, name, hook)
		timeout, policy := int32(hookTimeoutSeconds), hooksv1.FailurePolicyFail
		handlers = append(handlers, hooksv1.ExtensionHandler{
			Name:           name,
			RequestHook:    hooksv1.GroupVersionHook{APIVersion: gvh.GroupVersion().String(), Hook: gvh.Hook},
			TimeoutSeconds: &timeout,
			FailurePolicy:  &policy,
		})
	}
	route(mux, discovery(handlers), "", hooksv1.Discovery)
	return mux
}

// answerer fills the response for a request. An error becomes a failure.
type answerer interface {
	answer(ctx context.Context, request, response runtime.Object) error
}

type discovery []hooksv1.ExtensionHandler

func (d discovery) answer(_ context.Context, _, response runtime.Object) error {
	response.(*hooksv1.DiscoveryResponse).Handlers = d
	return nil
}

// route serves a hook at the path where Cluster API looks for it.
func route(mux *http.ServeMux, a answerer, name string, hook runtimecatalog.Hook) runtimecatalog.GroupVersionHook {
	gvh := must(catalog.GroupVersionHook(hook))
	kind := must(catalog.Request(gvh))
	mux.HandleFunc("POST "+runtimecatalog.GVHToPath(gvh, name), func(w http.ResponseWriter, r *http.Request) {
		request := must(catalog.NewRequest(gvh))
		response := must(catalog.NewResponse(gvh)).(hooksv1.ResponseObject)
		err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest)).Decode(request)
		if got := request.GetObjectKind().GroupVersionKind(); err == nil && got != kind {
			err = fmt.Errorf("the request is a %s, and not a %s", got, kind)
		}
		if err == nil {
			// A controller that hangs up does not stop what runs on the node.
			err = a.answer(context.WithoutCancel(r.Context()), request, response)
		}
		response.SetStatus(hooksv1.ResponseStatusSuccess)
		if err != nil {
			response.SetStatus(hooksv1.ResponseStatusFailure)
			response.SetMessage(err.Error())
		}
		log.Printf("%s: %s %s", gvh.Hook, response.GetStatus(), response.GetMessage())
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(response); err != nil {
			log.Print(err)
		}
	})
	return gvh
}

func (h *handler) answer(ctx context.Context, request, response runtime.Object) error {
	switch request := request.(type) {
	case *hooksv1.CanUpdateMachineRequest:
		return h.canUpdate(ctx, request, response.(*hooksv1.CanUpdateMachineResponse))
	case *hooksv1.CanUpdateMachineSetRequest:
		// Workers are none of the recipe's: without a patch, Cluster API replaces them.
		response.(*hooksv1.CanUpdateMachineSetResponse).SetMessage("no MachineSet is updated in place")
		return nil
	case *hooksv1.UpdateMachineRequest:
		return h.update(ctx, request, response.(*hooksv1.UpdateMachineResponse))
	}
	return fmt.Errorf("no answer to a %T", request)
}

// canUpdate has a patch of the Machine's version if the node can be upgraded, and else none.
func (h *handler) canUpdate(ctx context.Context, request *hooksv1.CanUpdateMachineRequest, response *hooksv1.CanUpdateMachineResponse) error {
	from, to := &request.Current.Machine, &request.Desired.Machine
	err := errors.Join(h.isMine(from), h.isMine(to))
	if err == nil && !follows(to.Spec.Version, from.Spec.Version) {
		err = fmt.Errorf("%q is neither a later patch of %q nor of the next minor version", to.Spec.Version, from.Spec.Version)
	}
	if err != nil {
		response.SetMessage(err.Error())
		return nil
	}
	status, said, err := h.ask(ctx, "check", to.Spec.Version)
	switch {
	case err != nil:
		return err
	case status == statusOK && said == "can: "+to.Spec.Version:
		patch, err := json.Marshal(map[string]any{"spec": map[string]any{"version": to.Spec.Version}})
		response.MachinePatch = hooksv1.Patch{PatchType: hooksv1.JSONMergePatchType, Patch: patch}
		return err
	case status == statusRefused:
		response.SetMessage(said)
		return nil
	}
	return fmt.Errorf("exit status %d: %s", status, said)
}

// update brings the Machine's version about, and reports how far that is.
func (h *handler) update(ctx context.Context, request *hooksv1.UpdateMachineRequest, response *hooksv1.UpdateMachineResponse) error {
	machine := &request.Desired.Machine
	if err := h.isMine(machine); err != nil {
		return err
	}
	status, said, err := h.ask(ctx, "run", machine.Spec.Version)
	switch {
	case err != nil:
		return err
	case status == statusOK && said == "done: "+machine.Spec.Version:
	case status == statusInProgress && strings.HasPrefix(said, "in progress: "):
		response.SetRetryAfterSeconds(retryAfterSeconds)
	default:
		return fmt.Errorf("exit status %d: %s", status, said)
	}
	response.SetMessage(said)
	return nil
}

func (h *handler) isMine(machine *clusterv1.Machine) error {
	if name := machine.Namespace + "/" + machine.Name; name != h.machine {
		return fmt.Errorf("Machine %q is not %s", name, h.machine)
	}
	if _, ok := machine.Labels[clusterv1.MachineControlPlaneLabel]; !ok {
		return fmt.Errorf("Machine %s is not labelled as one of the control plane", h.machine)
	}
	if !versionPattern.MatchString(machine.Spec.Version) {
		return fmt.Errorf("version %q is not v1.MINOR.PATCH", machine.Spec.Version)
	}
	return nil
}

// follows is true for a later patch of the same minor version, and for the next minor version.
func follows(version, older string) bool {
	next, now := numbers(version), numbers(older)
	return next[0] == now[0]+1 || next[0] == now[0] && next[1] > now[1]
}

// numbers returns minor and patch of a version that has been checked.
func numbers(version string) [2]int {
	parts := versionPattern.FindStringSubmatch(version)
	return [2]int{must(strconv.Atoi(parts[1])), must(strconv.Atoi(parts[2]))}
}

// ask runs the command for the node, without a shell, and returns its exit status and its last line.
func (h *handler) ask(ctx context.Context, action, version string) (int, string, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	var output tail
	command := exec.CommandContext(ctx, h.command[0], slices.Concat(h.command[1:], []string{action, version})...)
	command.Stdout, command.Stderr, command.WaitDelay = &output, os.Stderr, time.Second
	err := command.Run()
	var exit *exec.ExitError
	if ctx.Err() != nil {
		return 0, "", fmt.Errorf("the node has not answered for %s", commandTimeout)
	}
	if err != nil && !(errors.As(err, &exit) && exit.Exited()) {
		return 0, "", fmt.Errorf("%s: %w", h.command[0], err)
	}
	return command.ProcessState.ExitCode(), output.lastLine(), nil
}

// tail keeps the last bytes that are written to it.
type tail struct{ kept []byte }

func (t *tail) Write(bytes []byte) (int, error) {
	t.kept = append(t.kept, bytes...)
	t.kept = t.kept[max(0, len(t.kept)-1024):]
	return len(bytes), nil
}

func (t *tail) lastLine() string {
	lines := bytes.Split(bytes.TrimSpace(t.kept), []byte("\n"))
	return strings.Map(func(sign rune) rune {
		if !unicode.IsPrint(sign) {
			return -1
		}
		return sign
	}, string(lines[len(lines)-1]))
}

// must is for what only a mistake in this program makes fail.
func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}
