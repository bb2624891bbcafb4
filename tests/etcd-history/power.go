package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A copy of the disk at one moment.
type diskCopy struct {
	image string
	// Number of operations in the history at that moment.
	count int
	// Time since the node's etcd began to stop or to start.
	after time.Duration
	what  string
}

// power makes changes of hands on a file system in an image, and copies the image by reflink in
// their course. Then the node's etcd opens each copy alone. It returns true if every copy has every
// write that was acknowledged before. In the control, etcd does not sync.
func (s *settings) power() bool {
	ok, files := true, makeCertificates(s.work, "127.0.0.1")
	for number, program := range s.etcds {
		copies := max(1, s.copies/len(s.etcds))
		ok = s.powerOf(number, program, copies, files) && ok
	}
	return ok
}

func (s *settings) powerOf(number int, program string, copies int, files certificates) bool {
	stage := s.newStage(number, program, "", files)
	// The image is mounted here, and has all of etcd's files.
	stage.etcd.data = filepath.Join(s.mount, fmt.Sprintf("etcd-%d", number))
	stage.etcd.unsafe = s.unsafe
	defer stage.admin.Close()
	stage.etcd.start()
	check(stage.etcd.awaitServing(30 * time.Second))
	stage.history.first = stage.revision()
	stage.bridge.startAPIServer()
	check(stage.bridge.begin(true))
	stage.clients = startClients(stage.history, files, stage.random.Int63n(1<<30), path{"own address", "", func() string { return own }},
		stage.bridge.path())
	var taken []diskCopy
	for len(taken) < copies && len(stage.wrong) == 0 {
		time.Sleep(stage.between(100*time.Millisecond, 500*time.Millisecond))
		stopped := now()
		wait := stage.copyLater(&taken, "own stops", stopped)
		if stage.one(3) {
			stage.etcd.process.kill()
		} else {
			stage.etcd.process.stop()
		}
		if stage.awaitTemporary(stopped) {
			stage.changes++
		}
		wait()
		back := now()
		wait = stage.copyLater(&taken, "own comes back", back)
		stage.etcd.start()
		if err := stage.etcd.awaitServing(longest); err != nil {
			stage.wrong = append(stage.wrong, "unopenable: "+err.Error())
		}
		await(longest, func() bool { return stage.history.acknowledged(back) > 20 && !stage.etcd.temporaryServes() })
		stage.changes++
		wait()
	}
	result := &verdict{violations: stage.wrong}
	stage.finish(result)
	stage.bridge.apiserver.kill()
	judged := stage.history.judge(stage.bridge.work)
	found := append(result.violations, judged.violations...)
	opened, whole, lost, example := 0, 0, 0, ""
	for at, one := range taken {
		gone, err := stage.open(one)
		if err == nil {
			opened++
		}
		if err == nil && gone == 0 {
			whole++
			check(os.Remove(one.image))
			continue
		}
		lost += gone
		words := fmt.Sprintf("copy %d, %s after %s: %d acknowledged writes are not there (%v)", at, one.after.Round(time.Millisecond), one.what,
			gone, err)
		note("%s", words)
		if !s.unsafe {
			found = append(found, words)
		} else if example == "" {
			example = words
		}
	}
	name := "power loss"
	if s.unsafe {
		name = "control, etcd with --unsafe-no-fsync"
	}
	fmt.Printf("| %s: etcd %s, seed %d | |\n| --- | --- |\n", name, stage.etcd.version, s.seed)
	fmt.Printf("| changes of hands, operations, acknowledged writes | %d, %d, %d |\n", stage.changes, judged.operations, judged.writes)
	fmt.Printf("| copies of the disk that own etcd opened alone | %d of %d |\n", opened, len(taken))
	fmt.Printf("| copies that had all that was acknowledged before | %d of %d; gone in the others: %d |\n", whole, len(taken), lost)
	if len(found) > 0 {
		stage.history.dump(filepath.Join(stage.bridge.work, "history.jsonl"))
	}
	for _, violation := range found {
		fmt.Printf("| violation | %s |\n", strings.ReplaceAll(violation, "|", "/"))
	}
	if s.unsafe {
		if whole == len(taken) {
			fmt.Printf("| not found | no copy of an etcd that does not sync lacks a write: this check is blind |\n")
		}
		fmt.Printf("| such as | %s |\n", strings.ReplaceAll(example, "|", "/"))
		return whole < len(taken)
	}
	return len(found) == 0
}

// copyLater makes a copy at a random moment of the change of hands that begins.
func (s *stage) copyLater(taken *[]diskCopy, what string, since int64) (wait func()) {
	return s.later(1500*time.Millisecond, func() {
		image := fmt.Sprintf("%s.%d", s.image, len(*taken))
		s.history.lock.Lock()
		count := len(s.history.operations)
		s.history.lock.Unlock()
		after := time.Duration(now() - since)
		check(clone(s.image, image))
		note("copy %d taken, %s after %s, %d operations", len(*taken), after, what, count)
		*taken = append(*taken, diskCopy{image, count, after, what})
	})
}

// clone copies a file by reflink: at one moment, whatever its size.
func clone(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	target, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer target.Close()
	return unix.IoctlFileClone(int(target.Fd()), int(source.Fd()))
}

// open mounts a copy and starts the node's etcd on it, alone. It returns how many of the
// acknowledged writes are gone.
func (s *stage) open(one diskCopy) (gone int, err error) {
	at := filepath.Join(s.bridge.work, "copy")
	check(os.MkdirAll(at, 0o700))
	if out, err := exec.Command("mount", "-o", "loop", one.image, at).CombinedOutput(); err != nil {
		return 0, fmt.Errorf("mount: %w: %s", err, out)
	}
	defer func() {
		if out, failed := exec.Command("umount", at).CombinedOutput(); failed != nil && err == nil {
			err = fmt.Errorf("umount: %w: %s", failed, out)
		}
	}()
	e := *s.etcd
	e.data = filepath.Join(at, filepath.Base(s.etcd.data))
	e.log = filepath.Join(s.bridge.work, "copies.log")
	e.start()
	defer func() { e.process.stop() }()
	if !await(30*time.Second, func() bool { return e.serves() || !e.process.runs() }) || !e.process.runs() {
		return 0, fmt.Errorf("own etcd does not serve: %s", lastWords(e.log))
	}
	there, revision, err := readLedger(&e)
	if err != nil {
		return 0, err
	}
	missed, _ := missing(s.history.operations[:one.count], there)
	var last int64
	for _, did := range s.history.operations[:one.count] {
		last = max(last, did.Revision)
	}
	if revision < last && len(missed) == 0 {
		return int(last - revision), nil
	}
	return len(missed), nil
}
