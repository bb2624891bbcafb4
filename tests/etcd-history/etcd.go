package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
)

// own is the address of the node's etcd. A bridge steers dials from 127.0.0.1, and no dials from
// other addresses.
const own = "127.0.0.1:2379"

// The node's etcd, with a stand-in for its kubelet.
type etcd struct {
	program, version, data, log string
	certificates                certificates
	// True if etcd runs without fsync(2).
	unsafe  bool
	process *process
}

// argv returns the command line with addresses for clients, peers and metrics.
func (e *etcd) argv(clients, peers, metrics string) []string {
	argv := []string{
		e.program, "--name=history", "--data-dir=" + e.data,
		"--listen-client-urls=https://" + clients, "--advertise-client-urls=https://" + own,
		"--listen-peer-urls=http://" + peers, "--initial-advertise-peer-urls=http://127.0.0.1:2380",
		"--initial-cluster=history=http://127.0.0.1:2380", "--listen-metrics-urls=http://" + metrics,
		"--cert-file=" + e.certificates.certificate, "--key-file=" + e.certificates.key,
		"--trusted-ca-file=" + e.certificates.ca, "--client-cert-auth", "--snapshot-count=500", "--quota-backend-bytes=8589934592", "--log-level=info",
	}
	if e.unsafe {
		argv = append(argv, "--unsafe-no-fsync")
	}
	return argv
}

func (e *etcd) start() {
	e.process = start("own etcd", e.log, e.argv(own, "127.0.0.1:2380", "127.0.0.1:2381")...)
	note("own etcd starts: %d", e.process.pid())
}

// serves returns true if the node's etcd answers. The request bypasses the steering.
func (e *etcd) serves() bool { return e.process.runs() && answers(own, e.certificates) }

// awaitServing waits like the kubelet, which starts an ended etcd again. It fails if no start
// within the limit led to an answer. A slow etcd that does not end gets four times the limit.
func (e *etcd) awaitServing(limit time.Duration) error {
	restarts, began := 0, time.Now()
	serves := func() bool {
		if !e.process.runs() {
			restarts++
			time.Sleep(300 * time.Millisecond)
			e.start()
		}
		return e.serves()
	}
	if await(limit, serves) || restarts < 3 && await(3*limit, serves) {
		return nil
	}
	return fmt.Errorf("own etcd (%s) does not serve after %s and %d restarts: %s", e.version, time.Since(began).Round(time.Second), restarts,
		lastWords(e.log))
}

// temporary returns the other etcd of the same data directory, found in /proc.
func (e *etcd) temporary() (seen, bool) {
	for _, other := range with("--data-dir=" + e.data) {
		if e.process == nil || other.pid != e.process.pid() {
			return other, true
		}
	}
	return seen{}, false
}

// temporaryServes returns true if the temporary etcd answers at its own address.
func (e *etcd) temporaryServes() bool {
	other, found := e.temporary()
	if !found {
		return false
	}
	at, err := url.Parse(other.value("--listen-client-urls"))
	return err == nil && answers(at.Host, e.certificates)
}

func (e *etcd) signalTemporary(signal syscall.Signal) bool {
	other, found := e.temporary()
	if found {
		note("temporary etcd (%d) gets %s", other.pid, signal)
		_ = syscall.Kill(other.pid, signal)
	}
	return found
}

// lastWords returns the end of a log.
func lastWords(log string) string {
	text, _ := os.ReadFile(log)
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	for _, line := range lines {
		if strings.Contains(line, `"level":"panic"`) || strings.Contains(line, `"level":"fatal"`) {
			lines = append(lines, line)
		}
	}
	last := lines[len(lines)-1]
	return last[:min(len(last), 400)]
}

// dial connects to an address, from a source address if given.
func dial(ctx context.Context, from, to string) (net.Conn, error) {
	dialer := net.Dialer{Timeout: 2 * time.Second}
	if from != "" {
		dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	return dialer.DialContext(ctx, "tcp", to)
}

// connect returns a lazy connection. `address` is called at each dial.
func connect(config *tls.Config, from string, address func() string) *grpc.ClientConn {
	return must(grpc.NewClient("passthrough:///etcd",
		grpc.WithTransportCredentials(credentials.NewTLS(config)),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return dial(ctx, from, address()) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)),
		grpc.WithDisableRetry(),
		grpc.WithConnectParams(grpc.ConnectParams{
			// A client that reconnects at once sees more of a change of hands.
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, MaxDelay: 200 * time.Millisecond},
			MinConnectTimeout: 2 * time.Second,
		})))
}

// connectTo connects to an address, from a source address that is not steered.
func connectTo(address string, files certificates) *grpc.ClientConn {
	return connect(files.client(), "127.0.0.2", func() string { return address })
}

// answers returns true if an etcd has opened its data. Before, etcd answers nothing.
func answers(address string, files certificates) bool {
	connection := connectTo(address, files)
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	_, err := pb.NewMaintenanceClient(connection).Status(ctx, &pb.StatusRequest{})
	return err == nil
}

// defragment requests a defragmentation from the etcd at the connection's address.
func defragment(connection *grpc.ClientConn) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	began := time.Now()
	_, err := pb.NewMaintenanceClient(connection).Defragment(ctx, &pb.DefragmentRequest{})
	note("defragmentation after %s: %v", time.Since(began).Round(time.Millisecond), err)
}

// compact removes all revisions but the last few.
func compact(connection *grpc.ClientConn, keep int64) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	read, err := pb.NewKVClient(connection).Range(ctx, &pb.RangeRequest{Key: []byte("k/0")})
	if err == nil && read.Header.Revision > keep {
		_, err = pb.NewKVClient(connection).Compact(ctx, &pb.CompactionRequest{Revision: read.Header.Revision - keep})
	}
	note("compaction: %v", err)
}
