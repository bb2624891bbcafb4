// Certificates of kube-apiservers, and the verdicts of Go's crypto/x509 and crypto/tls, the client
// libraries of Kubernetes' components.
//
//	go run main.go make >certificates.txt   new ones, with Go's verdicts
//	go run main.go check certificates.txt   fails where Go's verdict is another than the file says
//	go run main.go pair >p-521.pem          one certificate and its key in both forms, for handshakes at any time
//	go run main.go serve DIR                serves TLS with keys of every kind, until standard input ends
package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const name = "kubernetes"

var (
	from   = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	to     = time.Date(2036, 1, 1, 0, 0, 0, 0, time.UTC)
	usual  = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	serial int64
)

func must[T any](it T, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return it
}

func p256() crypto.Signer { return must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)) }
func p384() crypto.Signer { return must(ecdsa.GenerateKey(elliptic.P384(), rand.Reader)) }
func p521() crypto.Signer { return must(ecdsa.GenerateKey(elliptic.P521(), rand.Reader)) }
func edwards() crypto.Signer {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	return must(key, err)
}
func rsaOf(bits int) crypto.Signer { return must(rsa.GenerateKey(rand.Reader, bits)) }

type change = func(*x509.Certificate)

// A certificate and its key.
type node struct {
	cert *x509.Certificate
	key  crypto.Signer
}

func (n node) pem() string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: n.cert.Raw}))
}

func create(template *x509.Certificate, issuer *node, key crypto.Signer, changes []change) node {
	serial++
	template.SerialNumber = big.NewInt(serial)
	template.NotBefore, template.NotAfter = from, to
	for _, change := range changes {
		change(template)
	}
	if issuer == nil {
		issuer = &node{template, key}
	}
	der := must(x509.CreateCertificate(rand.Reader, template, issuer.cert, key.Public(), issuer.key))
	return node{must(x509.ParseCertificate(der)), key}
}

func named(text string) pkix.Name { return pkix.Name{CommonName: text} }

func authority(key crypto.Signer, changes ...change) node {
	template := &x509.Certificate{Subject: named("a CA"), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	return create(template, nil, key, changes)
}

func (n node) authority(key crypto.Signer, changes ...change) node {
	template := &x509.Certificate{Subject: named("another CA"), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	return create(template, &n, key, changes)
}

func server() *x509.Certificate {
	return &x509.Certificate{Subject: named("kube-apiserver"), DNSNames: []string{name}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
}

func (n node) server(key crypto.Signer, changes ...change) node {
	return create(server(), &n, key, changes)
}
func selfSigned(key crypto.Signer, changes ...change) node {
	return create(server(), nil, key, changes)
}

func hash(algorithm x509.SignatureAlgorithm) change {
	return func(c *x509.Certificate) { c.SignatureAlgorithm = algorithm }
}

func isCA(c *x509.Certificate) { c.IsCA, c.BasicConstraintsValid = true, true }

func purpose(usages ...x509.ExtKeyUsage) change {
	return func(c *x509.Certificate) { c.ExtKeyUsage = usages }
}

func names(all ...string) change {
	return func(c *x509.Certificate) {
		c.DNSNames = nil
		for _, one := range all {
			if ip := net.ParseIP(one); ip != nil {
				c.IPAddresses = append(c.IPAddresses, ip)
			} else {
				c.DNSNames = append(c.DNSNames, one)
			}
		}
	}
}

func permitted(domain string) change {
	return func(c *x509.Certificate) {
		c.PermittedDNSDomainsCritical, c.PermittedDNSDomains = true, []string{domain}
	}
}

func network(text string) change {
	return func(c *x509.Certificate) {
		_, network, err := net.ParseCIDR(text)
		c.PermittedDNSDomainsCritical, c.PermittedIPRanges = true, []*net.IPNet{must(network, err)}
	}
}

// The certificates that a server sends, and the certificates that its client trusts.
type example struct {
	label, asked string
	at           time.Time
	// Line end of the trusted certificates' file.
	newline string
	trusted string
	shown   []node
}

func (e example) print() {
	shown := ""
	for _, one := range e.shown {
		shown += one.pem()
	}
	fmt.Printf("== %s\nname: %s\nat: %s\nnewline: %q\n", e.label, e.asked, e.at.Format(time.RFC3339), e.newline)
	trusted := strings.ReplaceAll(e.trusted, "\n", e.newline)
	fmt.Printf("go: %s\ntrusted:\n%s\nshown:\n%s", verdict(e.asked, e.at, trusted, shown), e.trusted, shown)
}

func make_() {
	fmt.Println("# Made by `go run main.go make`; see main.go.")
	add := func(label string, trusted node, shown ...node) {
		example{label, name, usual, "\n", trusted.pem(), shown}.print()
	}
	by := func(label string, ca crypto.Signer, changes ...change) {
		root := authority(ca, changes...)
		add(label, root, root.server(p256(), changes...))
	}
	by("rsa-1024", rsaOf(1024))
	by("rsa-2048", rsaOf(2048))
	by("rsa-3072-sha384", rsaOf(3072), hash(x509.SHA384WithRSA))
	by("rsa-4096-sha512", rsaOf(4096), hash(x509.SHA512WithRSA))
	by("rsa-8192", rsaOf(8192))
	by("rsa-pss", rsaOf(2048), hash(x509.SHA256WithRSAPSS))
	by("p-256", p256())
	by("p-256-sha384", p256(), hash(x509.ECDSAWithSHA384))
	by("p-256-sha512", p256(), hash(x509.ECDSAWithSHA512))
	by("p-384", p384())
	by("p-384-sha256", p384(), hash(x509.ECDSAWithSHA256))
	by("p-384-sha512", p384(), hash(x509.ECDSAWithSHA512))
	by("p-521", p521())
	by("p-521-sha256", p521(), hash(x509.ECDSAWithSHA256))
	by("p-521-sha384", p521(), hash(x509.ECDSAWithSHA384))
	by("ed25519", edwards())

	root, other := authority(p256()), authority(p256(), func(c *x509.Certificate) { c.Subject = named("a third CA") })
	add("key-p-521", root, root.server(p521()))
	add("key-ed25519", root, root.server(edwards()))
	between := root.authority(p384())
	add("intermediate", root, between.server(p256()), between)
	add("intermediate-not-shown", root, between.server(p256()))
	add("intermediate-trusted", between, between.server(p256()))
	p521Between := root.authority(p521())
	add("intermediate-p-521", root, p521Between.server(p256()), p521Between)
	short := authority(p256(), func(c *x509.Certificate) { c.MaxPathLenZero = true })
	deep := short.authority(p256())
	add("intermediate-too-many", short, deep.server(p256()), deep)
	add("another-ca", other, root.server(p256()))
	add("another-ca-of-the-name", authority(p256()), root.server(p256()))

	alone, ca := selfSigned(p256()), selfSigned(p256(), isCA)
	add("self-signed", alone, alone)
	add("self-signed-ca", ca, ca)
	signs := selfSigned(p521(), isCA, func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCertSign })
	add("self-signed-ca-p-521", signs, signs)
	add("self-signed-not-trusted", root, ca)
	pinned := root.server(p256())
	add("itself-trusted", pinned, pinned)
	add("itself-trusted-with-issuer-shown", pinned, pinned, root)
	weak := authority(rsaOf(1024))
	byWeak := weak.server(p256())
	example{"itself-trusted-beside-its-issuer", name, usual, "\n", byWeak.pem() + weak.pem(), []node{byWeak, weak}}.print()
	caPinned := root.server(p256(), isCA)
	add("itself-trusted-ca", caPinned, caPinned)
	add("ca-as-server", root, caPinned)

	ask := func(label, asked string, changes ...change) {
		example{label, asked, usual, "\n", root.pem(), []node{root.server(p256(), changes...)}}.print()
	}
	ask("name-missing", name, names("kube.example.com", "10.0.0.5"))
	ask("name-another", "kube.example.com", names("kube.example.com", "10.0.0.5"))
	ask("name-wildcard", "kubernetes.default.svc", names("*.default.svc"))
	ask("ip-alone", name, names("10.0.0.5"))
	ask("ip-asked", "10.0.0.5", names("10.0.0.5"))
	ask("ipv6-asked", "fd00::5", names("fd00::5"))
	ask("ip-another", "10.0.0.6", names("10.0.0.5"))
	ask("common-name-alone", name, names(), func(c *x509.Certificate) { c.Subject = named(name) })
	ask("purpose-client", name, purpose(x509.ExtKeyUsageClientAuth))
	ask("purpose-both", name, purpose(x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth))
	ask("purpose-any", name, purpose(x509.ExtKeyUsageAny))
	ask("purpose-none", name, purpose())
	policies := must(asn1.Marshal([]struct{ ID asn1.ObjectIdentifier }{{asn1.ObjectIdentifier{1, 2, 3}}}))
	ask("policies-critical", name, func(c *x509.Certificate) {
		c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 32}, Critical: true, Value: policies}}
	})

	both := names(name, "10.0.0.5")
	constrained := func(label string, constraint change) {
		root := authority(p256(), constraint)
		add(label, root, root.server(p256(), both))
		between := authority(p256())
		below := between.authority(p256(), constraint)
		add(label+"-of-an-intermediate", between, below.server(p256(), both), below)
	}
	constrained("names-permitted", permitted(name))
	constrained("names-not-permitted", permitted("example.com"))
	constrained("names-excluded", func(c *x509.Certificate) { c.PermittedDNSDomainsCritical, c.ExcludedDNSDomains = true, []string{name} })
	constrained("network-permitted", network("10.0.0.0/8"))
	constrained("network-not-permitted", network("192.168.0.0/16"))

	leaf := root.server(p256())
	at := func(label string, when time.Time, trusted node, shown ...node) {
		example{label, name, when, "\n", trusted.pem(), shown}.print()
	}
	at("expired-by-a-minute", to.Add(time.Minute), root, leaf)
	at("valid-in-a-minute", from.Add(-time.Minute), root, leaf)
	at("itself-trusted-expired", to.Add(time.Minute), pinned, pinned)
	at("self-signed-ca-expired", to.Add(time.Minute), ca, ca)
	old := authority(p256(), func(c *x509.Certificate) { c.NotAfter = usual.Add(-time.Minute) })
	add("issuer-expired", old, old.server(p256()))

	file := "# the CA of the old cluster\n" + other.pem() + "\nsubject=CN = a CA\n  issuer=ü, a CA\n" + root.pem() + "# end\n"
	text := func(label, newline, file string) { example{label, name, usual, newline, file, []node{leaf}}.print() }
	text("several-with-comments", "\n", file)
	text("lines-of-windows", "\r\n", file)
	text("lines-with-spaces", " \n", file)
	text("a-key-before", "\n", string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: []byte("none")}))+root.pem())
	text("a-broken-one-before", "\n", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"+root.pem())
	text("no-newline-at-the-end", "\n", strings.TrimSuffix(root.pem(), "\n"))
}

func verdict(asked string, at time.Time, trusted, shown string) string {
	roots, intermediates := x509.NewCertPool(), x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(trusted)) {
		return "refuses: no roots"
	}
	var chain []*x509.Certificate
	for block, rest := pem.Decode([]byte(shown)); block != nil; block, rest = pem.Decode(rest) {
		chain = append(chain, must(x509.ParseCertificate(block.Bytes)))
	}
	for _, issuer := range chain[1:] {
		intermediates.AddCert(issuer)
	}
	options := x509.VerifyOptions{DNSName: asked, Roots: roots, Intermediates: intermediates, CurrentTime: at}
	if _, err := chain[0].Verify(options); err != nil {
		return "refuses: " + strings.ReplaceAll(err.Error(), "\n", " ")
	}
	return "accepts"
}

func check(path string) {
	text := string(must(os.ReadFile(path)))
	checked, wrong := 0, 0
	for _, part := range strings.Split(text, "== ")[1:] {
		field := func(before, after string) string {
			_, rest, _ := strings.Cut(part, before)
			value, _, _ := strings.Cut(rest, after)
			return value
		}
		label, _, _ := strings.Cut(part, "\n")
		at := must(time.Parse(time.RFC3339, field("\nat: ", "\n")))
		_, shown, _ := strings.Cut(part, "\nshown:\n")
		newline := must(strconv.Unquote(field("\nnewline: ", "\n")))
		trusted := strings.ReplaceAll(field("\ntrusted:\n", "\nshown:\n"), "\n", newline)
		now := verdict(field("\nname: ", "\n"), at, trusted, shown)
		wrote := field("\ngo: ", "\n")
		checked++
		if strings.HasPrefix(now, "accepts") != strings.HasPrefix(wrote, "accepts") {
			wrong++
			fmt.Printf("%s: Go now %s; written is: %s\n", label, now, wrote)
		}
	}
	fmt.Printf("%d certificates, Go has changed its mind on %d\n", checked, wrong)
	if wrong > 0 || checked == 0 {
		os.Exit(1)
	}
}

func write(path, kind string, der []byte) {
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		must(0, err)
	}
}

// Prints the label and the address of a server for each kind of key. DIR contains LABEL.crt, which is
// its own CA, and LABEL.key. A request with that certificate is answered with 200.
func serve(dir string) {
	keys := []struct {
		label string
		key   crypto.Signer
	}{
		{"rsa-2048", rsaOf(2048)}, {"rsa-3072", rsaOf(3072)}, {"rsa-4096", rsaOf(4096)}, {"rsa-8192", rsaOf(8192)},
		{"p-256", p256()}, {"p-384", p384()}, {"p-521", p521()}, {"ed25519", edwards()},
	}
	for _, kind := range keys {
		own := selfSigned(kind.key, purpose(x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth), func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		})
		write(filepath.Join(dir, kind.label+".crt"), "CERTIFICATE", own.cert.Raw)
		write(filepath.Join(dir, kind.label+".key"), "PRIVATE KEY", must(x509.MarshalPKCS8PrivateKey(kind.key)))
		switch key := kind.key.(type) {
		case *rsa.PrivateKey:
			write(filepath.Join(dir, kind.label+".old.key"), "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(key))
		case *ecdsa.PrivateKey:
			write(filepath.Join(dir, kind.label+".old.key"), "EC PRIVATE KEY", must(x509.MarshalECPrivateKey(key)))
		}
		for _, newest := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
			clients := x509.NewCertPool()
			clients.AddCert(own.cert)
			config := &tls.Config{
				Certificates: []tls.Certificate{{Certificate: [][]byte{own.cert.Raw}, PrivateKey: kind.key}},
				ClientAuth:   tls.VerifyClientCertIfGiven, ClientCAs: clients, MaxVersion: newest,
			}
			listener := must(tls.Listen("tcp", "127.0.0.1:0", config))
			go http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if len(r.TLS.PeerCertificates) == 0 {
					w.WriteHeader(http.StatusUnauthorized)
				}
			}))
			fmt.Println(kind.label, listener.Addr())
		}
	}
	fmt.Println("all")
	io.Copy(io.Discard, os.Stdin)
}

func pair() {
	key := p521()
	own := selfSigned(key, purpose(x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth), func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = from.AddDate(-26, 0, 0), to.AddDate(64, 0, 0)
	})
	fmt.Print("# Made by `go run main.go pair`.\n", own.pem())
	fmt.Print(string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: must(x509.MarshalPKCS8PrivateKey(key))})))
	fmt.Print(string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: must(x509.MarshalECPrivateKey(key.(*ecdsa.PrivateKey)))})))
}

func main() {
	switch command := append(os.Args[1:], "", ""); command[0] {
	case "make":
		make_()
	case "pair":
		pair()
	case "check":
		check(command[1])
	case "serve":
		serve(command[1])
	default:
		fmt.Fprintln(os.Stderr, "usage: go run main.go make | pair | check FILE | serve DIR")
		os.Exit(64)
	}
}
