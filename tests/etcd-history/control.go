package main

import (
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Number of changes of hands within which the control must show a violation.
const soon = 20

// Time for calls in flight before the connections of a stopping etcd are ended, as under a bridge.
const grace = 300 * time.Millisecond

// Addresses of the waiting etcd and of the control's relay.
const waiting, relayed = "127.0.0.5:2379", "127.0.0.3:2379"

// control makes the same history in an unsafe way, without a bridge: a second etcd waits for the
// lock on the database, and the node's etcd is stopped around a defragmentation. It returns true if
// the judgement finds violations.
func (s *settings) control() bool {
	files := makeCertificates(s.work, "127.0.0.1")
	template := s.template(s.etcds[0], files)
	stage := s.newStage(0, s.etcds[0], template, files)
	defer stage.admin.Close()
	stage.etcd.start()
	check(stage.etcd.awaitServing(30 * time.Second))
	stage.history.first = stage.revision()
	relay := newRelay(relayed)
	relay.route(own)
	way := path{"relay", "", func() string { return relayed }}
	stage.clients = startClients(stage.history, files, stage.random.Int63n(1<<30), way, way)
	time.Sleep(300 * time.Millisecond)
	var found []string
	for stage.changes < soon && len(found) == 0 {
		found = stage.unsafeChange(relay)
	}
	stage.clients.stop()
	stage.clients.group.Wait()
	stage.clients.end(1, time.Second)
	judged := stage.history.judge(stage.bridge.work)
	fmt.Printf("| control, seed %d: a second etcd %s waits inside etcd for the lock | |\n| --- | --- |\n", s.seed, stage.etcd.version)
	fmt.Printf("| operations, acknowledged writes | %d, %d |\n", judged.operations, judged.writes)
	if len(found) == 0 {
		fmt.Printf("| not found | within %d changes of hands: this check is blind |\n", stage.changes)
		return false
	}
	fmt.Printf("| found | within %d changes of hands |\n", stage.changes)
	for _, violation := range append(found, judged.violations...) {
		fmt.Printf("| so | %s |\n", strings.ReplaceAll(violation, "|", "/"))
	}
	return true
}

// unsafeChange stops the node's etcd once, and returns the violations.
func (s *stage) unsafeChange(relay *relay) []string {
	argv := s.etcd.argv(waiting, "127.0.0.5:2380", "127.0.0.5:2381")
	log := filepath.Join(s.bridge.work, "waiting.log")
	other := start("waiting etcd", log, argv...)
	time.Sleep(s.between(300*time.Millisecond, 800*time.Millisecond))
	past := connectTo(own, s.etcd.certificates)
	defer past.Close()
	wait := s.later(100*time.Millisecond, func() { defragment(past) })
	time.Sleep(s.between(100*time.Millisecond, 500*time.Millisecond))
	stopped := now()
	cut := time.AfterFunc(grace, func() { relay.route("") })
	s.etcd.process.stop()
	cut.Stop()
	relay.route("")
	wait()
	served := await(30*time.Second, func() bool {
		if !other.runs() {
			// Restart after a second, as a bridge does.
			time.Sleep(time.Second)
			other = start("waiting etcd", log, argv...)
		}
		return answers(waiting, s.etcd.certificates)
	})
	if !served {
		other.kill()
		return []string{"unopenable: the waiting etcd does not serve: " + lastWords(log)}
	}
	relay.route(waiting)
	s.changes++
	for _, file := range openIn(other.pid(), s.etcd.data) {
		if strings.HasSuffix(file, "snap/db (deleted)") {
			s.history.mark("the waiting etcd serves from a file without a name")
		}
	}
	// More than --snapshot-count.
	await(20*time.Second, func() bool { return s.history.acknowledged(stopped) > 1200 })
	relay.route("")
	other.stop()
	s.etcd.start()
	if err := s.etcd.awaitServing(8 * time.Second); err != nil {
		return []string{"unopenable: " + err.Error()}
	}
	s.changes++
	relay.route(own)
	time.Sleep(300 * time.Millisecond)
	result := &verdict{}
	s.history.reopened(s.etcd, result)
	return result.violations
}

// A relay of bytes to the serving etcd.
type relay struct {
	lock sync.Mutex
	to   string
	open []net.Conn
}

func newRelay(at string) *relay {
	made, listener := &relay{}, must(net.Listen("tcp", at))
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			go made.pass(client)
		}
	}()
	return made
}

// route sends new connections to an address, and ends all others. "" holds connections.
func (r *relay) route(to string) {
	r.lock.Lock()
	defer r.lock.Unlock()
	if r.to == to {
		return
	}
	r.to = to
	for _, connection := range r.open {
		connection.Close()
	}
	r.open = nil
}

func (r *relay) pass(client net.Conn) {
	defer client.Close()
	var server net.Conn
	for range 200 {
		r.lock.Lock()
		to := r.to
		if to != "" {
			if made, err := net.Dial("tcp", to); err == nil {
				server = made
				r.open = append(r.open, client, server)
			}
		}
		r.lock.Unlock()
		if server != nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if server == nil {
		return
	}
	defer server.Close()
	go func() { _, _ = io.Copy(server, client); server.Close() }()
	_, _ = io.Copy(client, server)
}
