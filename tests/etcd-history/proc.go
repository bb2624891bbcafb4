package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// A process that this program started.
type process struct {
	name    string
	command *exec.Cmd
	// Closed when the process has ended.
	ended chan struct{}
}

var (
	startedLock sync.Mutex
	started     []*process
)

// start runs a program and appends its output to a log.
func start(name, log string, argv ...string) *process {
	file := must(os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600))
	command := exec.Command(argv[0], argv[1:]...)
	command.Stdout, command.Stderr = file, file
	check(command.Start())
	check(file.Close())
	begun := &process{name, command, make(chan struct{})}
	startedLock.Lock()
	started = append(started, begun)
	startedLock.Unlock()
	go func() {
		_ = command.Wait()
		note("%s (%d) ended: %s", name, command.Process.Pid, command.ProcessState)
		close(begun.ended)
	}()
	return begun
}

func (p *process) pid() int { return p.command.Process.Pid }

func (p *process) runs() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

func (p *process) signal(signal syscall.Signal) {
	if p.runs() {
		note("%s (%d) gets %s", p.name, p.pid(), signal)
		_ = p.command.Process.Signal(signal)
	}
}

// stop ends a process as the kubelet does: SIGTERM, and SIGKILL after 30 s.
func (p *process) stop() {
	if !p.runs() {
		return
	}
	p.signal(syscall.SIGTERM)
	select {
	case <-p.ended:
	case <-time.After(30 * time.Second):
		p.kill()
	}
}

func (p *process) kill() {
	if p.runs() {
		p.signal(syscall.SIGKILL)
		<-p.ended
	}
}

// endAll ends the remaining children of this program.
func endAll() {
	startedLock.Lock()
	all := slices.Clone(started)
	startedLock.Unlock()
	for _, left := range slices.Backward(all) {
		left.signal(syscall.SIGCONT)
		left.kill()
	}
}

// A process as /proc shows it.
type seen struct {
	pid  int
	argv []string
}

// value returns the value of a flag's last occurrence.
func (s seen) value(flag string) string {
	found := ""
	for at, argument := range s.argv {
		if name, value, whole := strings.Cut(argument, "="); name == flag && whole {
			found = value
		} else if argument == flag && at+1 < len(s.argv) {
			found = s.argv[at+1]
		}
	}
	return found
}

// with returns the processes that have an argument.
func with(argument string) []seen {
	var found []seen
	for _, path := range must(filepath.Glob("/proc/[0-9]*/cmdline")) {
		line, err := os.ReadFile(path)
		if err != nil || len(line) == 0 {
			continue
		}
		argv := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
		pid := must(strconv.Atoi(filepath.Base(filepath.Dir(path))))
		if slices.Contains(argv, argument) {
			found = append(found, seen{pid, argv})
		}
	}
	return found
}

// openIn returns the open files of a process in a directory, by the kernel's names: " (deleted)" at
// the end means that no name leads to the file.
func openIn(pid int, directory string) []string {
	var found []string
	for _, path := range must(filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))) {
		if to, err := os.Readlink(path); err == nil && strings.HasPrefix(to, directory) {
			found = append(found, to)
		}
	}
	return found
}

// await polls until a condition holds, and returns false after the limit. Time in which this
// program did not run does not count, since the awaited processes did not run either.
func await(limit time.Duration, holds func() bool) bool {
	const nap, counts = 50 * time.Millisecond, time.Second
	for waited := time.Duration(0); waited < limit; {
		began := time.Now()
		if holds() {
			return true
		}
		time.Sleep(nap)
		waited += min(time.Since(began), counts)
	}
	return holds()
}
