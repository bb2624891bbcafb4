package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Files of a certificate authority and a certificate that servers and clients share.
type certificates struct {
	ca, certificate, key string
	config               *tls.Config
}

// makeCertificates issues a certificate for the addresses.
func makeCertificates(directory string, addresses ...string) certificates {
	files := certificates{
		ca: filepath.Join(directory, "ca.crt"), certificate: filepath.Join(directory, "all.crt"), key: filepath.Join(directory, "all.key"),
	}
	caKey, key := newKey(), newKey()
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "etcd-history"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(48 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "root"},
		NotBefore: ca.NotBefore, NotAfter: ca.NotAfter, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    []string{"kubernetes"},
	}
	for _, address := range addresses {
		leaf.IPAddresses = append(leaf.IPAddresses, net.ParseIP(address))
	}
	root := must(x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey))
	issued := must(x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey))
	writePEM(files.ca, "CERTIFICATE", root)
	writePEM(files.certificate, "CERTIFICATE", issued)
	writePEM(files.key, "EC PRIVATE KEY", must(x509.MarshalECPrivateKey(key)))
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(must(os.ReadFile(files.ca)))
	pair := must(tls.LoadX509KeyPair(files.certificate, files.key))
	// All servers have the certificate of 127.0.0.1, at any address.
	files.config = &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}, ServerName: "127.0.0.1"}
	return files
}

// client returns the configuration of etcd's clients.
func (c certificates) client() *tls.Config { return c.config.Clone() }

func newKey() *ecdsa.PrivateKey { return must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)) }

func writePEM(path, kind string, bytes []byte) {
	check(os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: bytes}), 0o600))
}
