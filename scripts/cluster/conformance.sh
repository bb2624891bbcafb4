# shellcheck shell=bash
# Part of scripts/cluster.sh: Kubernetes' own tests, again and again while kubeadm replaces etcd and the control plane. They are of the
# version before the newest, and both versions pass them.

# The conformance tests of sig-api-machinery that need kube-apiserver and etcd alone: no image, no pod, and no controller, for kubeadm replaces
# controllers, too. A kube-apiserver that stops ends its watches, so tests that hold a watch for long are left out, and the tests of OpenAPI are,
# so that a run is short.
readonly FOCUS='\[sig-api-machinery\].*\[Conformance\]'
readonly SKIP='Webhook|Aggregator|PublishOpenAPI|Garbage collector|ResourceQuota|Watchers|MUST list and watch|should ensure that all|\[Slow\]'
# The message of a test whose short watch was open when a kube-apiserver stopped.
readonly WATCH_ENDED='^([Ww]atch closed unexpectedly|watch channel should not close)'

conformance_begins() {
    etcd_begins
    # The tests are clients enough for two processors.
    rate=$((rate < 8 ? rate : 8))
    run_tests before
    expect "Kubernetes' own tests that passed before" "$(tests before passed)" -ge 25
    expect "Kubernetes' own tests that did not pass before" "$(tests before other)" -eq 0
}

conformance_operates() {
    while [[ ! -e $work/operated ]]; do run_tests meanwhile; done &
    pid[tests]=$! needed[tests]=
    await 120 "the first test" first_test_passed
    say "conformance: ${operator[*]}"
    on_the_node "${operator[@]}" >"$work/operator.log" 2>&1 || status=$?
}

first_test_passed() { grep -qs '^• \[' "$work"/tests-meanwhile-*.log; }

conformance_ends() {
    local when
    etcd_ends
    unset "needed[tests]"
    touch "$work/operated"
    await 900 "the tests under way to end" has_ended tests
    await_pods
    run_tests after
    heading "$(printf '  %-34s %8s %6s %6s %12s %14s' "Kubernetes' own tests" "runs" "passed" "failed" "watch ended" "could not begin")"
    for when in before meanwhile after; do
        row "$when" "$(printf '%8d %6d %6d %12d %14d' "$(tests $when runs)" "$(tests $when passed)" "$(tests $when failed)" \
            "$(tests $when ended)" "$(tests $when vain)")"
    done
    jq -r 'select(.state != "passed") | "\(.when), run \(.run), at \(.at): \(.name): \(.message)"' "$work/tests.out" >"$work/tests-failed.log"
    expect "tests that passed after" "$(tests after passed)" -eq "$(tests before passed)"
    if [[ $bridge ]]; then
        expect "whole runs meanwhile" "$(tests meanwhile passed)" -ge "$(tests before passed)"
        expect "tests that failed meanwhile" "$(tests meanwhile failed)" -eq 0 tests-failed.log
        expect "runs that could not begin meanwhile" "$(tests meanwhile vain)" -eq 0 tests-failed.log
    else
        expect "tests and runs that failed without a bridge" $(($(tests meanwhile failed) + $(tests meanwhile vain))) -gt 0
    fi
}

# run_tests WHEN: from another host; a line for each test, and for a run that could not begin, in tests.out
run_tests() {
    now 'at[tests]'
    rm -f "$work/tests.json"
    # Pods need not be ready, for they are replaced.
    HOME=$work/node TMPDIR=$work/node ip netns exec far "$E2E_TEST" --kubeconfig /etc/kubernetes/admin.conf --kubectl-path "$PROGRAMS/$OLD/kubectl" \
        --allowed-not-ready-nodes 10 --dump-logs-on-failure=false --ginkgo.focus "$FOCUS" --ginkgo.skip "$SKIP" --ginkgo.v --ginkgo.no-color \
        --ginkgo.timeout 15m --ginkgo.json-report "$work/tests.json" >"$work/tests-$1-${at[tests]}.log" 2>&1 || :
    [[ -s $work/tests.json ]] || echo '[{"SpecReports": [{"State": "aborted", "LeafNodeText": "no report"}]}]' >"$work/tests.json"
    jq -c --arg when "$1" --arg run "${at[tests]}" '.[].SpecReports[] | (.LeafNodeType == "It") as $test |
        select(if $test then .State != "skipped" else .State != "passed" end) |
        {$when, $run, $test, at: .StartTime, state: .State, name: ((.ContainerHierarchyTexts // []) + [.LeafNodeText] | join(" ")),
        message: (.Failure.Message // "")[:300]}' "$work/tests.json" >>"$work/tests.out"
}

# tests WHEN WHAT: how many
tests() {
    jq -n --arg when "$1" --arg what "$2" --arg ended "$WATCH_ENDED" '[inputs | select(.when == $when)] |
        map(select(.test and .state != "passed")) as $failed | {
            runs: (map(select(.test).run) | unique | length), passed: (map(select(.state == "passed")) | length),
            other: (map(select(.state != "passed")) | length), vain: (map(select(.test | not)) | length),
            failed: ($failed | map(select(.message | test($ended) | not)) | length), ended: ($failed | map(select(.message | test($ended))) | length)
        }[$what]' "$work/tests.out"
}
