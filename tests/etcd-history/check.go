package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
	bolt "go.etcd.io/bbolt"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// Violations by kind: linearizability, lost writes, revisions that go back, watches, a directory
// that does not open.
type verdict struct {
	violations []string
	// Number of acknowledged writes, and how many of them are gone.
	writes, gone int
	operations   int
	unknown      int
}

func (v *verdict) wrong(format string, arguments ...any) {
	v.violations = append(v.violations, fmt.Sprintf(format, arguments...))
}

// A key's state in the model.
type cell struct {
	value    string
	modified int64
}

// model is a register with etcd's revisions and compare-and-swap, for one key.
var model = porcupine.Model{
	Partition: func(all []porcupine.Operation) [][]porcupine.Operation {
		byKey := map[string][]porcupine.Operation{}
		for _, one := range all {
			key := one.Input.(operation).Key
			byKey[key] = append(byKey[key], one)
		}
		var parts [][]porcupine.Operation
		for _, part := range byKey {
			parts = append(parts, part)
		}
		return parts
	},
	Init: func() any { return cell{} },
	Step: func(state, input, _ any) (bool, any) {
		have, did := state.(cell), input.(operation)
		switch {
		case did.writes() && did.Kind == swap && have.modified != did.Expects:
			return false, have
		case did.writes():
			return did.Revision > have.modified, cell{did.Value, did.Revision}
		case did.Kind == swap && have.modified == did.Expects:
			return false, have
		}
		return cell{did.Found, did.Modified} == have && did.Revision >= have.modified, have
	},
	DescribeOperation: func(input, _ any) string {
		did := input.(operation)
		return fmt.Sprintf("%s %s %s expects %d: revision %d %t %s@%d", did.Kind, did.Key, did.Value, did.Expects, did.Revision,
			did.Succeeded, did.Found, did.Modified)
	},
	DescribeState: func(state any) string { return fmt.Sprintf("%+v", state) },
}

// judge checks a whole history, without knowledge of which etcd served when.
func (h *history) judge(directory string) *verdict {
	h.lock.Lock()
	defer h.lock.Unlock()
	result := &verdict{operations: len(h.operations)}
	events := h.merge(result)
	h.revisions(result)
	h.writesAreThere(events, result)
	var known []porcupine.Operation
	for _, did := range h.resolved(events, result) {
		if strings.HasPrefix(did.Key, reads) {
			known = append(known, porcupine.Operation{ClientId: did.Client, Input: did, Call: did.Call, Return: did.Return})
		}
	}
	outcome, information := porcupine.CheckOperationsVerbose(model, known, 60*time.Second)
	if outcome != porcupine.Ok {
		result.wrong("porcupine: %d operations of %d keys are not linearizable (%s)", len(known), keys, outcome)
		if file, err := os.Create(filepath.Join(directory, "porcupine.html")); err == nil {
			_ = porcupine.Visualize(model, information, file)
			file.Close()
		}
	}
	return result
}

// merge combines the watches' events. Each watch has every revision once, in order, except
// compacted ones, and all watches agree.
func (h *history) merge(result *verdict) map[int64]event {
	events := map[int64]event{}
	for _, seen := range h.watches {
		for _, broken := range seen.broken {
			result.wrong("watch: %s", broken)
		}
		for _, one := range seen.events {
			other, known := events[one.Revision]
			if known && (other.Key != one.Key || other.Value != one.Value) {
				result.wrong("watch: revision %d is %s=%s and %s=%s", one.Revision, other.Key, other.Value, one.Key, one.Value)
			}
			if !known || one.At < other.At {
				events[one.Revision] = one
			}
		}
	}
	return events
}

// revisions checks that over all clients the store's revision never goes back in real time, and
// that no two writes share a revision.
func (h *history) revisions(result *verdict) {
	byCall, byReturn := slices.Clone(h.operations), slices.Clone(h.operations)
	byCall = slices.DeleteFunc(byCall, func(did operation) bool { return did.Error != "" })
	byReturn = slices.DeleteFunc(byReturn, func(did operation) bool { return did.Error != "" })
	sort.Slice(byCall, func(a, b int) bool { return byCall[a].Call < byCall[b].Call })
	sort.Slice(byReturn, func(a, b int) bool { return byReturn[a].Return < byReturn[b].Return })
	at, latest, back := 0, operation{}, 0
	written := map[int64]operation{}
	for _, did := range byCall {
		for ; byReturn[at].Return < did.Call; at++ {
			if byReturn[at].Revision > latest.Revision {
				latest = byReturn[at]
			}
		}
		if did.Revision < latest.Revision || did.writes() && did.Revision == latest.Revision {
			if back++; back == 1 {
				result.wrong("revision: %s of %s by client %d, called at %s, was answered at revision %d; %d had been answered before",
					did.Kind, did.Key, did.Client, time.Duration(did.Call).Round(time.Millisecond), did.Revision, latest.Revision)
			}
		}
		if did.writes() {
			if other, known := written[did.Revision]; known {
				result.wrong("revision: %d was given to %s=%s and to %s=%s", did.Revision, other.Key, other.Value, did.Key, did.Value)
			}
			written[did.Revision] = did
		}
	}
	if back > 1 {
		result.wrong("revision: went back for %d operations in all", back)
	}
}

// writesAreThere checks that watches delivered each acknowledged write.
func (h *history) writesAreThere(events map[int64]event, result *verdict) {
	compacted := func(revision int64) bool {
		for _, seen := range h.watches {
			if !slices.ContainsFunc(seen.gaps, func(gap [2]int64) bool { return gap[0] <= revision && revision <= gap[1] }) {
				return false
			}
		}
		return true
	}
	missing := 0
	for _, did := range h.operations {
		if !did.writes() {
			continue
		}
		result.writes++
		one, delivered := events[did.Revision]
		if delivered && (one.Key != did.Key || one.Value != did.Value) || !delivered && !compacted(did.Revision) {
			if missing++; missing == 1 {
				result.wrong("watch: the write of %s=%s at revision %d was acknowledged and not delivered", did.Key, did.Value, did.Revision)
			}
		}
	}
	if missing > 1 {
		result.wrong("watch: %d acknowledged writes were not delivered in all", missing)
	}
}

// resolved leaves out requests of unknown outcome if no client saw an effect. For other requests of
// unknown outcome it fills in the revision, and an end before the first client saw the effect. With
// such requests open until the end, the search would not terminate.
func (h *history) resolved(events map[int64]event, result *verdict) []operation {
	type sight struct{ revision, at int64 }
	sights := map[string]sight{}
	see := func(value string, revision, at int64) {
		if known, found := sights[value]; value != "" && (!found || at < known.at) {
			sights[value] = sight{revision, at}
		}
	}
	for _, one := range events {
		see(one.Value, one.Revision, one.At)
	}
	for _, did := range h.operations {
		see(did.Found, did.Modified, did.Return)
	}
	var all []operation
	for _, did := range h.operations {
		if did.Error == "" {
			all = append(all, did)
			continue
		}
		result.unknown++
		if by, found := sights[did.Value]; found && did.Kind != get {
			did.Error, did.Revision, did.Succeeded, did.Return = "", by.revision, true, by.at
			all = append(all, did)
		}
	}
	return all
}

func (h *history) dump(path string) {
	file, err := os.Create(path)
	if err != nil {
		return
	}
	defer file.Close()
	encoder := json.NewEncoder(file)
	for _, did := range h.operations {
		_ = encoder.Encode(did)
	}
	for _, seen := range h.watches {
		for _, one := range seen.events {
			_ = encoder.Encode(map[string]any{"watch": seen.name, "event": one})
		}
	}
}

// reopened checks a data directory whose etcd serves alone: every acknowledged write is there. The
// reads become part of the history.
func (h *history) reopened(e *etcd, result *verdict) {
	connection := connectTo(own, e.certificates)
	defer connection.Close()
	for number := range keys {
		did := perform(connection, operation{Client: 99, Kind: get, Key: fmt.Sprintf("%s%d", reads, number)})
		if did.Error != "" {
			result.wrong("reopened: %s: %s", did.Key, did.Error)
			continue
		}
		h.add(did)
	}
	h.lock.Lock()
	before := slices.Clone(h.operations)
	h.lock.Unlock()
	there, revision, err := readLedger(e)
	if err != nil {
		result.wrong("reopened: %v", err)
		return
	}
	gone, acknowledged := missing(before, there)
	result.gone += len(gone)
	if len(gone) > 0 {
		result.wrong("lost: %d of %d acknowledged writes of the ledger are gone, such as %s at revision %d", len(gone), acknowledged,
			gone[0].Key, gone[0].Revision)
	}
	for _, did := range before {
		if did.Revision > revision {
			result.wrong("lost: the store is at revision %d, and %d was answered", revision, did.Revision)
			break
		}
	}
}

// missing returns the ledger's acknowledged writes that the store lacks or has with another value.
func missing(all []operation, there map[string]cell) (gone []operation, acknowledged int) {
	for _, did := range all {
		if !did.writes() || !strings.HasPrefix(did.Key, ledger) {
			continue
		}
		acknowledged++
		if there[did.Key] != (cell{did.Value, did.Revision}) {
			gone = append(gone, did)
		}
	}
	return gone, acknowledged
}

func readLedger(e *etcd) (map[string]cell, int64, error) {
	connection := connectTo(own, e.certificates)
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	answer, err := pb.NewKVClient(connection).Range(ctx, &pb.RangeRequest{Key: []byte(ledger), RangeEnd: []byte("ledger0")})
	if err != nil {
		return nil, 0, err
	}
	there := map[string]cell{}
	for _, pair := range answer.Kvs {
		there[string(pair.Key)] = cell{string(pair.Value), pair.ModRevision}
	}
	return there, answer.Header.Revision, nil
}

// checkDatabase checks each page of a closed database with bbolt.
func checkDatabase(data string, result *verdict) {
	database, err := bolt.Open(filepath.Join(data, "member/snap/db"), 0o600, &bolt.Options{ReadOnly: true, Timeout: 5 * time.Second})
	if err != nil {
		result.wrong("bbolt: %v", err)
		return
	}
	defer database.Close()
	_ = database.View(func(tx *bolt.Tx) error {
		for err := range tx.Check() {
			result.wrong("bbolt: %v", err)
		}
		return nil
	})
}
