package main

import (
	"context"
	"fmt"
	"maps"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// Longest change of hands. With processes that hang on purpose, some take 20 s.
const longest = 45 * time.Second

// kubeadm regards etcd as failed after 150 s, and copies its backup back.
const kubeadmWaits = 150 * time.Second / speedup

// Interval of kubeadm's checks of etcd. If etcd serves for the interval, kubeadm regards it as
// healthy, and a bridge counts the next absence anew.
const kubeadmAsks = 15 * time.Second / speedup

// A data directory with its etcd, bridges and clients.
type stage struct {
	*settings
	etcd    *etcd
	bridge  *bridge
	history *history
	clients *clients
	// A connection like an administrator's on the node.
	admin   *grpc.ClientConn
	random  *rand.Rand
	changes int
	wrong   []string
	// How often an etcd had a database without a name.
	nameless atomic.Int64
	// Absences of the node's etcd in which the temporary etcd did not serve.
	unserved []string
}

// Totals of a run.
type totals struct {
	changes, directories, operations, unknown, writes, gone, opened int
	violations, unserved                                            []string
	nameless                                                        int64
	late                                                            atomic.Int64
	pauses                                                          map[string][]time.Duration
	faults                                                          map[string]int
}

// history makes a whole run: data directories one after the other, with each version of etcd in
// turn.
func (s *settings) history() bool {
	began := time.Now()
	all := totals{pauses: map[string][]time.Duration{}, faults: map[string]int{}}
	files := makeCertificates(s.work, "127.0.0.1")
	templates := map[string]string{}
	for number := 0; all.changes < s.changes && time.Since(began) < s.limit && len(all.violations) == 0; number++ {
		program := s.etcds[number%len(s.etcds)]
		if templates[program] == "" {
			templates[program] = s.template(program, files)
		}
		stage := s.newStage(number, program, templates[program], files)
		stage.run(min(s.each, s.changes-all.changes), &all, began)
		say("directory %d, etcd %s: %d changes of hands in all after %s, %d operations, %d acknowledged writes, %d violations", number,
			stage.etcd.version, all.changes, time.Since(began).Round(time.Second), all.operations, all.writes, len(all.violations))
	}
	all.print(s.what, s.seed)
	if all.changes < s.changes && len(all.violations) == 0 {
		fmt.Printf("| limit | %d of %d changes of hands within %s |\n", all.changes, s.changes, s.limit)
	}
	return len(all.violations)+len(all.unserved) == 0 && (all.changes >= s.changes || !s.all)
}

func (t *totals) print(what string, seed int64) {
	fmt.Printf("| %s, seed %d | |\n| --- | --- |\n", what, seed)
	fmt.Printf("| changes of hands | %d, on %d data directories |\n", t.changes, t.directories)
	fmt.Printf("| operations | %d, %d of them of unknown outcome |\n", t.operations, t.unknown)
	fmt.Printf("| acknowledged writes | %d, of those of the ledger gone: %d |\n", t.writes, t.gone)
	fmt.Printf("| data directories that own etcd opened alone | %d of %d |\n", t.opened, t.directories)
	for _, name := range slices.Sorted(maps.Keys(t.pauses)) {
		all := t.pauses[name]
		sort.Slice(all, func(a, b int) bool { return all[a] < all[b] })
		round := func(pause time.Duration) time.Duration { return pause.Round(10 * time.Millisecond) }
		fmt.Printf("| longest pause of a change: %s | median %s, longest %s of %d |\n", name, round(all[len(all)/2]), round(all[len(all)-1]), len(all))
	}
	fmt.Printf("| this program itself was late by | at most %s |\n", time.Duration(t.late.Load()).Round(time.Millisecond))
	var faults []string
	for _, name := range slices.Sorted(maps.Keys(t.faults)) {
		faults = append(faults, fmt.Sprintf("%s %d", name, t.faults[name]))
	}
	fmt.Printf("| done to it | %s |\n", strings.Join(faults, ", "))
	fmt.Printf("| violations | %d |\n", len(t.violations))
	fmt.Printf("| an etcd had a database that no name leads to, for 0.5 s | %d times |\n", t.nameless)
	fmt.Printf("| absences in which no temporary etcd served within %s | %d |\n", longest, len(t.unserved))
	for _, words := range t.unserved {
		fmt.Printf("| unserved | %s |\n", strings.ReplaceAll(words, "|", "/"))
	}
	for _, violation := range t.violations {
		fmt.Printf("| violation | %s |\n", strings.ReplaceAll(violation, "|", "/"))
	}
}

// template makes a data directory of the given size, which each stage copies, so that a
// defragmentation takes as long as on a node.
func (s *settings) template(program string, files certificates) string {
	directory := filepath.Join(s.work, fmt.Sprintf("template-%s", versionOf(program)))
	e := &etcd{
		program: program, version: versionOf(program), data: directory, log: filepath.Join(s.work, "template.log"), certificates: files,
	}
	e.start()
	check(e.awaitServing(30 * time.Second))
	connection := connectTo(own, files)
	defer connection.Close()
	value := make([]byte, 256<<10)
	for number := range s.size * 4 {
		rand.New(rand.NewSource(int64(number))).Read(value)
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		must(pb.NewKVClient(connection).Put(ctx, &pb.PutRequest{Key: fmt.Appendf(nil, "filler/%d", number), Value: value}))
		cancel()
	}
	e.process.stop()
	return directory
}

// named returns a link to a program with the name by which a bridge recognizes etcd.
func (s *settings) named(program string) string {
	directory := filepath.Join(s.work, "program-"+versionOf(program))
	check(os.MkdirAll(directory, 0o700))
	link := filepath.Join(directory, "etcd")
	if _, err := os.Lstat(link); err != nil {
		check(os.Symlink(program, link))
	}
	return link
}

func versionOf(program string) string {
	out := must(exec.Command(program, "--version").Output())
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimPrefix(line, "etcd Version: ")
}

func (s *settings) newStage(number int, program, template string, files certificates) *stage {
	work := filepath.Join(s.work, fmt.Sprintf("%s-%d", s.what, number))
	check(os.MkdirAll(work, 0o700))
	data := filepath.Join(work, "etcd")
	if template != "" {
		check(exec.Command("cp", "-a", template, data).Run())
	}
	stage := &stage{
		settings: s, history: &history{}, random: rand.New(rand.NewSource(s.seed*1000 + int64(number))),
		etcd:   &etcd{program: s.named(program), version: versionOf(program), data: data, log: filepath.Join(work, "etcd.log"), certificates: files},
		bridge: &bridge{berth: s.berth, directory: filepath.Join(work, "bridge"), work: work, certificates: files},
		admin:  connect(files.client(), "", func() string { return own }),
	}
	stage.bridge.relay.Store("")
	return stage
}

// run makes a number of changes of hands, and judges the history.
func (s *stage) run(changes int, all *totals, began time.Time) {
	work := s.bridge.work
	s.etcd.start()
	check(s.etcd.awaitServing(30 * time.Second))
	s.history.first = s.revision()
	s.bridge.startAPIServer()
	check(s.bridge.begin(s.random.Intn(2) == 0))
	s.clients = startClients(s.history, s.etcd.certificates, s.random.Int63n(1<<30), path{"own address", "", func() string { return own }},
		s.bridge.path())
	watching, stopWatching := context.WithCancel(context.Background())
	defer stopWatching()
	go all.watchMachine(watching)
	go s.watchFiles(watching)
	time.Sleep(300 * time.Millisecond)
	// kubeadm's backup comes last: no etcd can keep the writes that kubeadm takes back.
	kubeadm := changes > 4 && !s.calm && s.random.Intn(2) == 0
	for s.changes < changes && len(s.wrong) == 0 && time.Since(began) < s.limit {
		from := now()
		faults := s.change()
		to := now()
		kind := kindOf(faults)
		pause := s.history.pause(from, to)
		all.pauses[kind] = append(all.pauses[kind], pause)
		for _, fault := range faults {
			all.faults[fault]++
		}
		note("%d changes, pause %s, %v", s.changes, pause, faults)
	}
	result := &verdict{violations: s.wrong}
	if len(s.wrong) == 0 {
		if kubeadm && (s.backups == "any" || s.backups == "command" && s.bridge.commanding) {
			all.faults["kubeadm's backup copied back"]++
			s.kubeadmRestores(result)
		} else {
			s.finish(result)
		}
	} else {
		s.clients.end(1, time.Second)
		s.bridge.kill()
	}
	s.admin.Close()
	s.bridge.apiserver.kill()
	s.etcd.process.kill()
	if len(s.wrong) == 0 {
		checkDatabase(s.etcd.data, result)
	}
	judged := s.history.judge(work)
	all.changes += s.changes
	all.directories++
	all.operations += judged.operations
	all.unknown += judged.unknown
	all.writes += judged.writes
	all.gone += result.gone
	all.unserved = append(all.unserved, s.unserved...)
	all.nameless += s.nameless.Load()
	if len(result.violations) == 0 {
		all.opened++
	}
	for _, violation := range slices.Concat(result.violations, judged.violations) {
		all.violations = append(all.violations, fmt.Sprintf("%s, etcd %s: %s", filepath.Base(work), s.etcd.version, violation))
	}
	if len(all.violations) == 0 {
		check(os.RemoveAll(s.etcd.data))
	} else {
		s.history.dump(filepath.Join(work, "history.jsonl"))
	}
}

// kindOf classifies a change by the faults that make its pause long.
func kindOf(faults []string) string {
	has := func(words ...string) bool {
		return slices.ContainsFunc(faults, func(fault string) bool {
			return slices.ContainsFunc(words, func(word string) bool { return strings.Contains(fault, word) })
		})
	}
	switch {
	case has("SIGSTOP"):
		return "something hung"
	case has("SIGKILL of the bridge"):
		return "the bridge was killed"
	case has("SIGKILL", "SIGTERM", "at once"):
		return "an etcd was killed, or own started early"
	case len(faults) > 0:
		return "defragmentation or compaction alone"
	}
	return "nothing else"
}

// watchFiles counts how often an etcd had a database without a name for half a second.
func (s *stage) watchFiles(ctx context.Context) {
	row := map[int]int{}
	for ctx.Err() == nil {
		time.Sleep(100 * time.Millisecond)
		for _, one := range with("--data-dir=" + s.etcd.data) {
			if !slices.Contains(openIn(one.pid, s.etcd.data), filepath.Join(s.etcd.data, "member/snap/db")+" (deleted)") {
				row[one.pid] = 0
				continue
			}
			if row[one.pid]++; row[one.pid] == 5 {
				s.nameless.Add(1)
				s.history.mark("process %d has a database that no name leads to, own: %t", one.pid, one.value("--listen-client-urls") == "https://"+own)
			}
		}
	}
}

// watchMachine measures how late this program itself is. If it is late by a second, pauses come
// from the machine.
func (t *totals) watchMachine(ctx context.Context) {
	const nap = 20 * time.Millisecond
	for ctx.Err() == nil {
		began := time.Now()
		time.Sleep(nap)
		if late := time.Since(began) - nap; late > time.Duration(t.late.Load()) {
			t.late.Store(int64(late))
		}
	}
}

// revision returns the store's revision, past the steering.
func (s *stage) revision() int64 {
	connection := connectTo(own, s.etcd.certificates)
	defer connection.Close()
	did := perform(connection, operation{Kind: get, Key: reads + "0"})
	if did.Error != "" {
		panic("own etcd does not answer: " + did.Error)
	}
	return did.Revision
}

// finish ends the clients and the bridge. Then it starts the node's etcd alone, which has every
// acknowledged write.
func (s *stage) finish(result *verdict) {
	if err := s.bridge.end(); err != nil {
		result.wrong("bridge: %v", err)
		s.bridge.kill()
	}
	s.clients.stop()
	s.clients.group.Wait()
	s.clients.end(s.revision(), 20*time.Second)
	s.etcd.process.stop()
	if other, found := s.etcd.temporary(); found {
		result.wrong("bridge: process %d has the data after the bridge ended", other.pid)
	}
	s.etcd.start()
	if err := s.etcd.awaitServing(30 * time.Second); err != nil {
		result.wrong("unopenable: %v", err)
		return
	}
	s.history.reopened(s.etcd, result)
	s.etcd.process.stop()
}

// pause returns the longest time in which no client was answered.
func (h *history) pause(from, to int64) time.Duration {
	h.lock.Lock()
	defer h.lock.Unlock()
	var returns []int64
	for at := len(h.operations) - 1; at >= 0 && h.operations[at].Return > from-int64(longest); at-- {
		if did := h.operations[at]; did.Error == "" && from <= did.Return && did.Return <= to {
			returns = append(returns, did.Return)
		}
	}
	slices.Sort(returns)
	last, pause := from, int64(0)
	for _, at := range append(returns, to) {
		pause, last = max(pause, at-last), at
	}
	return time.Duration(pause)
}

func (s *stage) between(least, most time.Duration) time.Duration {
	return least + time.Duration(s.random.Int63n(int64(most-least)))
}

func (s *stage) one(in int) bool { return !s.calm && s.random.Intn(in) == 0 }

// kind draws a fault. Without faults, it returns `calm`.
func (s *stage) kind(of, calm int) int {
	if s.calm {
		return calm
	}
	return s.random.Intn(of)
}

// later calls a function at a random moment within a duration. The returned function waits for the
// call.
func (s *stage) later(within time.Duration, do func()) (wait func()) {
	delay, done := s.between(0, within), make(chan struct{})
	go func() {
		defer close(done)
		time.Sleep(delay)
		do()
	}()
	return func() { <-done }
}

// change stops the node's etcd once: two changes of hands if the temporary etcd served. It returns
// the faults.
func (s *stage) change() (faults []string) {
	fault := func(name string) { faults = append(faults, name); s.history.mark("fault: %s", name) }
	var waits []func()
	defer func() {
		for _, wait := range waits {
			wait()
		}
		time.Sleep(s.between(20*time.Millisecond, 400*time.Millisecond))
	}()
	time.Sleep(s.between(20*time.Millisecond, 300*time.Millisecond))
	if s.one(4) {
		fault("compaction")
		waits = append(waits, s.later(200*time.Millisecond, func() { compact(s.admin, 300) }))
	}
	if s.one(3) {
		fault("defragmentation of own that stops")
		waits = append(waits, s.later(200*time.Millisecond, func() { defragment(s.admin) }))
		time.Sleep(s.between(0, 400*time.Millisecond))
	}
	// The node's etcd goes away.
	stopped := now()
	atOnce := false
	switch kind := s.kind(20, 0); {
	case kind < 10:
		s.etcd.process.stop()
	case kind < 13:
		fault("SIGKILL of own")
		s.etcd.process.kill()
	case kind < 15:
		fault("SIGSTOP of own, then SIGKILL")
		s.etcd.process.signal(syscall.SIGSTOP)
		time.Sleep(s.between(100*time.Millisecond, 2*time.Second))
		s.etcd.process.kill()
	case kind < 17:
		fault("SIGSTOP of own, then SIGCONT")
		s.etcd.process.signal(syscall.SIGSTOP)
		time.Sleep(s.between(100*time.Millisecond, 2*time.Second))
		s.etcd.process.signal(syscall.SIGCONT)
		time.Sleep(s.between(0, 500*time.Millisecond))
		s.etcd.process.stop()
	case kind < 19:
		fault("own started at once")
		s.etcd.process.stop()
		time.Sleep(s.between(0, 600*time.Millisecond))
		atOnce = true
	default:
		fault("SIGKILL of own, started at once")
		s.etcd.process.kill()
		time.Sleep(s.between(0, 300*time.Millisecond))
		atOnce = true
	}
	killed := false
	if !atOnce {
		if s.awaitTemporary(stopped) {
			s.changes++
			time.Sleep(s.between(20*time.Millisecond, 300*time.Millisecond))
			killed = s.whileTemporary(fault, &waits)
		}
		time.Sleep(s.between(0, 300*time.Millisecond))
	}
	s.etcd.start()
	if !killed {
		killed = s.whileOwnWaits(fault, &waits)
	}
	if err := s.etcd.awaitServing(longest); err != nil {
		s.wrong = append(s.wrong, "unopenable: "+err.Error())
		return faults
	}
	back := now()
	// Afterwards, the node's etcd has the data alone, and clients reach it.
	if !await(longest, func() bool { return s.history.acknowledged(back) > 20 && !s.etcd.temporaryServes() }) {
		s.wrong = append(s.wrong, fmt.Sprintf("nobody is served %s after own etcd is back (the temporary one serves: %t)", longest,
			s.etcd.temporaryServes()))
		return faults
	}
	s.changes++
	// The next absence belongs to another COMMAND.
	time.Sleep(time.Until(epoch.Add(time.Duration(back) + kubeadmAsks + 300*time.Millisecond)))
	if killed {
		if err := s.bridge.begin(s.random.Intn(2) == 0); err != nil {
			s.wrong = append(s.wrong, err.Error())
		}
	}
	return faults
}

// awaitTemporary waits until the temporary etcd serves clients.
func (s *stage) awaitTemporary(since int64) bool {
	served := func() bool {
		return s.etcd.temporaryServes() && s.history.acknowledged(max(since, now()-int64(time.Second))) > 5
	}
	if await(longest, served) {
		return true
	}
	other, runs := s.etcd.temporary()
	s.unserved = append(s.unserved, fmt.Sprintf("no temporary etcd serves clients %s after own stopped (process %d: %t, answers %t): %s",
		longest, other.pid, runs, s.etcd.temporaryServes(), lastWords(filepath.Join(s.bridge.directory, "bridge.log"))))
	s.history.mark("%s", s.unserved[len(s.unserved)-1])
	return false
}

// whileTemporary causes a fault while the temporary etcd serves. It returns true if the bridge was
// killed.
func (s *stage) whileTemporary(fault func(string), waits *[]func()) bool {
	switch kind := s.kind(24, 23); {
	case kind < 4:
		fault("defragmentation of the temporary one")
		wait := s.later(100*time.Millisecond, func() { defragment(s.admin) })
		*waits = append(*waits, wait)
		time.Sleep(s.between(0, time.Second))
	case kind < 7:
		fault("compaction under the temporary one")
		compact(s.admin, 300)
	case kind < 10:
		fault("SIGKILL of the temporary one")
		killed := now()
		s.etcd.signalTemporary(syscall.SIGKILL)
		if !s.one(3) {
			s.awaitTemporary(killed)
		}
	case kind < 12:
		fault("SIGSTOP of the temporary one")
		s.hang(s.etcd.signalTemporary, 3*time.Second)
	case kind < 14:
		fault("SIGKILL of the bridge")
		s.bridge.kill()
		time.Sleep(s.between(0, 500*time.Millisecond))
		return true
	case kind < 15:
		fault("SIGSTOP of the bridge")
		s.hang(s.signalBridge, 3*time.Second)
	}
	return false
}

// whileOwnWaits causes a fault while the node's etcd waits for the data, or has just got the data.
func (s *stage) whileOwnWaits(fault func(string), waits *[]func()) bool {
	time.Sleep(s.between(0, 150*time.Millisecond))
	switch kind := s.kind(24, 23); {
	case kind < 3:
		fault("defragmentation while own comes back")
		*waits = append(*waits, s.later(300*time.Millisecond, func() { defragment(s.admin) }))
	case kind < 5:
		fault("SIGKILL of the temporary one while own comes back")
		s.etcd.signalTemporary(syscall.SIGKILL)
	case kind < 7:
		fault("SIGSTOP of the temporary one while own comes back")
		s.hang(s.etcd.signalTemporary, 3*time.Second)
	case kind < 9:
		fault("SIGTERM of own as it comes back")
		s.etcd.process.stop()
		time.Sleep(s.between(0, 500*time.Millisecond))
		s.etcd.start()
	case kind < 11:
		fault("SIGKILL of own as it comes back")
		s.etcd.process.kill()
		time.Sleep(s.between(0, 500*time.Millisecond))
		s.etcd.start()
	case kind < 12:
		fault("SIGKILL of the bridge while own comes back")
		s.bridge.kill()
		return true
	case kind < 13:
		fault("SIGSTOP of the bridge while own comes back")
		s.hang(s.signalBridge, 3*time.Second)
	case kind < 14:
		fault("SIGSTOP of own as it comes back")
		s.etcd.process.signal(syscall.SIGSTOP)
		time.Sleep(s.between(100*time.Millisecond, 2*time.Second))
		s.etcd.process.signal(syscall.SIGCONT)
	case kind < 16:
		fault("compaction while own comes back")
		*waits = append(*waits, s.later(300*time.Millisecond, func() { compact(s.admin, 300) }))
	}
	return false
}

// hang stops a process by SIGSTOP for a while, one time in five for longer than a bridge waits.
func (s *stage) hang(signal func(syscall.Signal) bool, most time.Duration) {
	last := s.between(100*time.Millisecond, most)
	if s.one(5) {
		last = 12 * time.Second
	}
	signal(syscall.SIGSTOP)
	time.Sleep(last)
	signal(syscall.SIGCONT)
}

func (s *stage) signalBridge(signal syscall.Signal) bool {
	// A stopped process answers nothing, so ask for its pid before.
	if signal == syscall.SIGSTOP {
		s.bridge.hung = s.bridge.pid()
	}
	note("bridge (%d) gets %s", s.bridge.hung, signal)
	return s.bridge.hung > 0 && syscall.Kill(s.bridge.hung, signal) == nil
}

// kubeadmRestores does what `kubeadm upgrade` does if the new etcd does not start: it copies a
// backup that was taken while etcd ran over the data. At that time, no process may have the data
// open. Afterwards the node's etcd opens the data, and has every write that was acknowledged before
// the backup.
func (s *stage) kubeadmRestores(result *verdict) {
	s.history.mark("fault: kubeadm's backup")
	s.clients.pause()
	backup := filepath.Join(s.bridge.work, "backup")
	check(os.MkdirAll(backup, 0o700))
	check(exec.Command("cp", "-r", s.etcd.data, backup).Run())
	taken := now()
	s.clients.paused.Store(false)
	time.Sleep(300 * time.Millisecond)
	stopped := now()
	s.etcd.process.stop()
	if s.awaitTemporary(stopped) {
		s.changes++
	}
	if s.one(2) {
		s.history.mark("fault: own serves for a moment")
		time.Sleep(s.between(0, kubeadmWaits/2))
		s.etcd.start()
		if err := s.etcd.awaitServing(longest); err != nil {
			result.wrong("unopenable while kubeadm waits: %v", err)
			return
		}
		time.Sleep(s.between(0, kubeadmAsks/2))
		s.etcd.process.stop()
	}
	time.Sleep(time.Until(epoch.Add(time.Duration(stopped) + kubeadmWaits)))
	if other, found := s.etcd.temporary(); found {
		if open := openIn(other.pid, s.etcd.data); len(open) > 0 {
			result.wrong("backup: kubeadm copies it over data that process %d has open: %v", other.pid, open)
		}
	}
	s.clients.stop()
	s.history.endAt(now())
	check(exec.Command("cp", "-r", filepath.Join(backup, filepath.Base(s.etcd.data)), filepath.Dir(s.etcd.data)).Run())
	s.bridge.kill()
	s.clients.end(1, time.Second)
	s.etcd.start()
	if err := s.etcd.awaitServing(longest); err != nil {
		result.wrong("unopenable after kubeadm's backup: %v", err)
		return
	}
	there, _, err := readLedger(s.etcd)
	if err != nil {
		result.wrong("after kubeadm's backup: %v", err)
		return
	}
	s.history.lock.Lock()
	before := slices.DeleteFunc(slices.Clone(s.history.operations), func(did operation) bool { return did.Return > taken })
	s.history.lock.Unlock()
	if gone, acknowledged := missing(before, there); len(gone) > 0 {
		result.gone += len(gone)
		result.wrong("lost: %d of %d writes that were acknowledged before kubeadm's backup are gone", len(gone), acknowledged)
	}
	s.etcd.process.stop()
}
