package main

import (
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// A `berth bridge` between a stand-in for a kube-apiserver and etcd.
type bridge struct {
	berth, directory, work string
	apiserver              *process
	command                string
	certificates           certificates
	// True if the bridge runs a COMMAND. False for `berth bridge start`.
	commanding bool
	caller     *process
	// A file that is removed when COMMAND is to end.
	held  string
	relay atomic.Value
	count int
	// The pid that SIGSTOP was sent to.
	hung int
}

// Divisor of times that no option sets, and of kubeadm's times.
const speedup = 10

// startAPIServer runs the stand-in, which a bridge copies.
func (b *bridge) startAPIServer() {
	program := filepath.Join(b.work, "kube-apiserver")
	if _, err := os.Lstat(program); err != nil {
		check(os.Symlink(must(os.Executable()), program))
	}
	argv := []string{
		program, "--stand-in=true", "--secure-port=6443", "--advertise-address=" + nodeAddress,
		"--etcd-servers=https://" + own, "--etcd-cafile=" + b.certificates.ca, "--etcd-certfile=" + b.certificates.certificate,
		"--etcd-keyfile=" + b.certificates.key, "--tls-cert-file=" + b.certificates.certificate,
		"--tls-private-key-file=" + b.certificates.key,
	}
	b.command = strings.Join(argv, " ")
	b.apiserver = start("kube-apiserver", filepath.Join(b.work, "apiserver.log"), argv...)
}

// begin starts a bridge, and repeats the start until a bridge runs. After a fault, etcd may be slow
// to answer.
func (b *bridge) begin(commanding bool) error {
	b.commanding = commanding
	b.count++
	b.held = filepath.Join(b.work, fmt.Sprintf("held-%d", b.count))
	check(os.WriteFile(b.held, nil, 0o600))
	log := filepath.Join(b.work, "bridge-caller.log")
	options := []string{
		"--state-dir", b.directory, "--settle=0s", fmt.Sprintf("--speedup=%d", speedup), "--command", b.command,
		"--probe-ca", b.certificates.ca,
	}
	for range 10 {
		if commanding {
			argv := append([]string{b.berth, "bridge"}, options...)
			b.caller = start("berth bridge", log, append(argv, "--", "sh", "-c", "while [ -e "+b.held+" ]; do sleep 0.1; done")...)
		} else {
			b.caller = start("berth bridge start", log, append([]string{b.berth, "bridge", "start"}, options...)...)
		}
		if await(20*time.Second, func() bool { return b.isOn() || !b.caller.runs() }) && b.isOn() {
			b.relay.Store(b.findRelay())
			note("bridge is on: %d, relay %s, with COMMAND: %t", b.pid(), b.relay.Load(), commanding)
			return nil
		}
		if status := b.status(); status.Step == "hold" && status.Etcd == nil {
			return fmt.Errorf("the bridge leaves etcd alone: see %s", log)
		}
		b.caller.kill()
		time.Sleep(time.Second)
	}
	return fmt.Errorf("no bridge can be begun: %s", lastWords(log))
}

type status struct {
	Pid     int    `json:"pid"`
	Step    string `json:"step"`
	Command bool   `json:"command"`
	Etcd    *struct {
		Step    string  `json:"step"`
		Pid     int     `json:"pid"`
		Pauses  []int64 `json:"pauses"`
		Trouble string  `json:"trouble"`
	} `json:"etcd"`
}

func (b *bridge) status() (found status) {
	out, err := exec.Command(b.berth, "bridge", "status", "--json", "--state-dir", b.directory).Output()
	if err == nil {
		_ = json.Unmarshal(out, &found)
	}
	return found
}

// isOn returns true if the bridge holds the port, and COMMAND runs if there is one.
func (b *bridge) isOn() bool {
	status := b.status()
	return status.Step == "hold" && status.Etcd != nil && (!b.commanding || status.Command)
}

func (b *bridge) pid() int { return b.status().Pid }

// findRelay returns the address at which the temporary kube-apiserver dials etcd.
func (b *bridge) findRelay() string {
	for _, other := range with("--stand-in=true") {
		if to, err := url.Parse(other.value("--etcd-servers")); err == nil && to.Host != own {
			return to.Host
		}
	}
	return ""
}

// path returns the way of the temporary kube-apiserver to etcd.
func (b *bridge) path() path {
	return path{"relay", "", func() string {
		to, _ := b.relay.Load().(string)
		if to == "" {
			return "127.0.0.1:1"
		}
		return to
	}}
}

// kill ends the bridge by SIGKILL, and COMMAND, too.
func (b *bridge) kill() {
	if pid := b.pid(); pid > 0 {
		note("bridge (%d) gets SIGKILL", pid)
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	b.letCommandEnd()
}

func (b *bridge) letCommandEnd() {
	_ = os.Remove(b.held)
	b.relay.Store("")
	select {
	case <-b.caller.ended:
	case <-time.After(20 * time.Second):
		b.caller.kill()
	}
}

// end ends the bridge as an operator does. Connections to its relay then go to the node's etcd.
func (b *bridge) end() error {
	defer b.relay.Store(own)
	if b.commanding {
		// COMMAND restarts the kube-apiserver.
		b.apiserver.kill()
		b.startAPIServer()
		_ = os.Remove(b.held)
		select {
		case <-b.caller.ended:
		case <-time.After(90 * time.Second):
			return fmt.Errorf("the bridge did not end within 90 s of COMMAND's end")
		}
		// The bridge may still drain connections to the temporary kube-apiserver.
		_ = exec.Command(b.berth, "bridge", "end", "--now", "--state-dir", b.directory).Run()
		return nil
	}
	out, err := exec.Command(b.berth, "bridge", "end", "--now", "--state-dir", b.directory).CombinedOutput()
	if err != nil {
		return fmt.Errorf("berth bridge end: %w: %s", err, out)
	}
	return nil
}
