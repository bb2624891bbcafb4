// Command etcd-history makes a history of etcd under a bridge, and judges the history.
// scripts/etcd-history.sh and scripts/etcd-power.sh run it in namespaces of their own.
//
//	certs.go    certificates
//	standin.go  the kube-apiserver that a bridge copies
//	proc.go     processes, and facts about other processes from /proc
//	etcd.go     the node's etcd, and requests outside of the history
//	bridge.go   `berth bridge`
//	record.go   clients and their records
//	check.go    the judgement: porcupine, watches, revisions, the store in the end
//	run.go      changes of hands, and faults
//	control.go  the control without a bridge: a second etcd waits for the lock
//	power.go    copies of the disk during a change of hands
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// A node address other than loopback.
const nodeAddress = "10.77.0.1"

var (
	noteLock sync.Mutex
	notes    *os.File
)

// note writes a line about an event outside of the clients.
func note(format string, arguments ...any) {
	noteLock.Lock()
	defer noteLock.Unlock()
	if notes != nil {
		fmt.Fprintf(notes, "%9.3f %s\n", time.Since(epoch).Seconds(), fmt.Sprintf(format, arguments...))
	}
}

// say writes a line of progress.
func say(format string, arguments ...any) {
	line := fmt.Sprintf(format, arguments...)
	note("%s", line)
	fmt.Fprintln(os.Stderr, line)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func must[T any](value T, err error) T {
	check(err)
	return value
}

func main() {
	if slices.Contains(os.Args, "--stand-in=true") {
		standIn()
		return
	}
	var given settings
	flag.StringVar(&given.what, "what", "history", "history, control or power")
	flag.StringVar(&given.work, "work", "", "a directory for data and logs")
	flag.StringVar(&given.berth, "berth", "", "the berth to test")
	flag.Var(&given.etcds, "etcd", "an etcd; each in turn")
	flag.IntVar(&given.changes, "changes", 500, "changes of hands")
	flag.IntVar(&given.each, "each", 50, "changes of hands of one data directory")
	flag.IntVar(&given.copies, "copies", 50, "copies of the disk")
	flag.Int64Var(&given.seed, "seed", 1, "what is drawn at random")
	flag.IntVar(&given.size, "size", 64, "MiB that are in the database before")
	flag.DurationVar(&given.limit, "limit", time.Hour, "begin no more changes after this")
	flag.DurationVar(&given.within, "within", 24*time.Hour, "end as failed after this")
	flag.BoolVar(&given.calm, "calm", false, "do nothing to it but stop and start own")
	flag.BoolVar(&given.all, "all", false, "fewer changes than that are a failure")
	flag.StringVar(&given.image, "image", "", "power: the image that the file system of the data lies in")
	flag.StringVar(&given.mount, "mount", "", "power: where that file system is mounted")
	flag.BoolVar(&given.unsafe, "unsafe", false, "power: let etcd not sync, so that something is lost")
	flag.StringVar(&given.backups, "backups", "any", "when kubeadm's backup is copied back: under any bridge, under a command, or none")
	flag.Parse()
	notes = must(os.Create(filepath.Join(given.work, given.what+".log")))
	time.AfterFunc(given.within, func() {
		say("FAILED: %s was not done within %s", given.what, given.within)
		endAll()
		os.Exit(1)
	})
	ok := false
	defer func() {
		failed := recover()
		endAll()
		if failed != nil {
			panic(failed)
		}
		if !ok {
			os.Exit(1)
		}
	}()
	switch given.what {
	case "history":
		ok = given.history()
	case "control":
		ok = given.control()
	case "power":
		ok = given.power()
	}
}

type settings struct {
	what, work, berth, image, mount string
	backups                         string
	unsafe, all, calm               bool
	etcds                           list
	changes, each, copies, size     int
	seed                            int64
	limit, within                   time.Duration
}

type list []string

func (l *list) String() string         { return fmt.Sprint(*l) }
func (l *list) Set(value string) error { *l = append(*l, value); return nil }
