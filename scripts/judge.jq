# What scripts conclude from the lines of tls-load: objects {began, client, outcome, took, detail, …}, times in microseconds. Each
# filter takes an array of these; spans are arrays [began, ended]. scripts/judge.test has handmade cases, and `jq --run-tests` runs them.

# All lines, as `jq -nR` reads them; the last one may still be being written. And an array of them for each file.
def lines: [inputs] | [(.[:-1][] | fromjson), (.[-1:][] | fromjson?)];
def files: [inputs | fromjson + {file: input_filename}] | group_by(.file);

def good: .outcome == "ok";
def lost: .outcome == "lost";
def ended: .began + .took;
def during($from; $to): map(select(.began >= $from and .began < $to));
def pad($width): tostring | ((" " * ($width - length)) // "") + .;
# Microseconds as seconds with one decimal.
def seconds: (. / 1e5 | round) as $tenths | "\($tenths / 10 | floor).\($tenths % 10)";

# Requests that began in a period: their number, how many were not answered well, and the longest in microseconds.
def window($from; $to): during($from; $to) | "\(length) \(map(select(good | not)) | length) \(map(.took) | max // 0)";

# Of new connections that began in spans [from, gone, to], where the server ended at gone, if that is not 0: their number, those lost in the
# TLS handshake, of the others those that began after the server's end, those that began before and those that the server answered 503 as it
# ended, and the longest in microseconds.
def openings($spans):
    map(.began as $began | .span = first($spans[] | select(.[0] <= $began and $began < .[2])) | select(.span))
    | (map(select(lost) | if .detail | startswith("connect:") then 0 elif .span[1] > 0 and .began > .span[1] then 1
        elif .detail | startswith("request: 503") then 3 else 2 end)) as $lost
    | "\(length) \([range(4) as $kind | $lost | map(select(. == $kind)) | length | tostring] | join(" ")) \(map(.took) | max // 0)";

# Clients of all kinds: requests, and how many of these were lost, connections cut, and watches and informers that missed an event or saw it twice.
def kept: "\(map(select(good or lost)) | length) \(map(select(lost or .outcome == "flawed" or (.outcome == "ended" and (.told | not)))) | length)";

# Requests a second.
def pace: map(.began) | if length < 2 then 0 else (length - 1) * 1e6 / ([1, max - min] | max) | round end;

# The longest time without a good answer, in microseconds.
def silence($from; $to):
    reduce (.[] | select(good)) as $request ({longest: 0};
        if .last and $request.began >= $from then .longest = ([.longest, ($request | ended) - .last] | max) else . end
        | .last = ($request | ended))
    | [.longest, if .last then $to - .last else 0 end] | max;

# What kind of loss a reason is, of tls-load or of kubectl.
def kind:
    if test("refused") then "refused"
    elif test("reset") then "reset"
    elif test("nanswered|[Tt]imeout|timed out|deadline") then "unanswered"
    elif test("closed|EOF") then "closed"
    elif test("Forbidden") then "403"
    else (match("[45][0-9][0-9]").string // "other") end;
def kinds: map(.detail | kind) | group_by(.) | map("\(.[0]) \(length)");

# Columns: answered, lost, lost for how long, the longest, and how they were lost.
def figures($from):
    map(select(.began >= $from)) | map(select(lost)) as $lost
    | (if $lost == [] then 0 elif ($lost | length) == 1 then $lost[0].took else ($lost[-1] | ended) - $lost[0].began end) as $lasted
    | (map(select(good or lost).took) | max // 0) as $longest
    | "\(map(select(good)) | length | pad(8)) \($lost | length | pad(6)) \($lasted | seconds | pad(7))s \($longest | seconds | pad(8))s"
        + "  \($lost | kinds | join(", "))";

# How many streams ended, and how that was announced.
def ends($from):
    map(select(.began >= $from)) | map(select(.outcome == "ended").told) as $told | (map(select(.outcome == "told")) | length) as $answers
    | "\($told | length | pad(8)) ended: \($told | map(select(.)) | length) told by the apiserver, \($told | map(select(not)) | length) cut"
        + if $answers > 0 then "; told by an answer 503 or 429: \($answers)" else "" end;

# The spans of what was lost.
def losses($from): map(select(.began >= $from and lost) | [.began, ended]);

# An instance that shuts down answers 503 or 429 on the connections that it has, and closes them: this announces its end to the client
# and is no loss, so "lost" becomes "told". It is a loss if the connection was new, or if it stays open.
def told:
    . as $lines
    | reduce range(length) as $at ({};
        $lines[$at] as $line | $line.client as $client
        | if $line | good then .answered[$client] = true | del(.rejected[$client])
          elif ($line | lost) and .answered[$client] and ($line.detail | test("^(503|429)\\b")) then .rejected[$client] += [$at]
          elif $line.outcome == "ended" then .told += (.rejected[$client] // [])
          else . end)
    | reduce (.told // [])[] as $at ($lines; .[$at].outcome = "told");

# What kube-apiserver itself ended because the machine had no time for its client: it waits 2 s for the first frame of HTTP/2
# (golang.org/x/net/http2, firstSettingsTimeout) and logs that. The log does not show which connection it is about, so at most this many
# of those that can be are "slow" and not "lost".
def slow($most):
    . as $lines
    | [range(length) | select($lines[.] | lost and .took > 2e6 and (.detail | kind | . == "reset" or . == "closed"))][:$most]
    | reduce .[] as $at ($lines; .[$at].outcome = "slow");

# What a kill cost, of an array for each way: lost; of these begun after the victim's end; never answered, or refused, in time since its
# successor is ready; seconds until all ways are answered again; the longest wait in seconds; lost how.
def killed($killed; $gone; $back; $until; $bound):
    map(map(select(ended >= $killed and .began <= $until))) as $ways
    | ($ways | add // []) as $all | ($all | map(select(lost))) as $lost
    | [ $ways[] | reduce .[] as $request (0;
        if $request | lost then 0
        elif . == 0 and $request.began > $gone and ($request | good) then ($request | ended) - $killed
        else . end) ] as $again
    | ($all | map(select(.began > $back and (.took > $bound or (lost and (.detail | kind) == "unanswered"))))) as $swallowed
    | [($lost | length), ($lost | map(select(.began > $gone)) | length), ($swallowed | length), ($again | max // 0 | seconds),
       ($all | map(.took) | max // 0 | seconds)] + ($lost | kinds) | join(" ");

# How long after something is there again its absence excuses a loss: as long again, and 2 s, for gRPC, which kube-apiserver has to etcd,
# dials again after 1 s, then after 1.6 times as long each time.
def excuses_until: 2 * .[1] - .[0] + 2e6;

# Of spans of what was lost, how many neither were under way nor began while something that excuses them was away.
def unexcused($away):
    map(. as [$began, $ended] | select(any($away[]; $ended >= .[0] and $began <= excuses_until) | not)) | length;

# For how long something was away, and what was lost then.
def away($lost):
    . as $away
    | [$lost[] | .[0] as $began | first($away[] | select($began >= .[0] and $began <= excuses_until)) | $began - .[1]] as $after
    | (if length == 1 then "" else "\(length) times, " end)
        + "\(map(.[1] - .[0]) | add // 0 | seconds) s; \($after | length) lost then, "
        + "the last one \([0, $after[]] | max | seconds) s after it was back";
