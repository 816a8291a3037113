#!/bin/sh
# Gathers stripped release binaries in stage/ for a GPU machine that has no cargo: the command line, the
# tests and the benches. Copy the repository with stage/ there (same libc or newer, x86-64) and run, in its
# root, `stage/bin/makaira …` and `sh stage/run-tests.sh`.
#
#   scripts/stage.sh [--no-tests] [--no-benches]
#
# MAKAIRA_STAGE_LIMIT_MIB (64) bounds the size. Tests that look at no GPU stay here: see `here`.
set -eu
cd "$(dirname "$0")/.."
limit_mib=${MAKAIRA_STAGE_LIMIT_MIB:-64}
here="backend_stub checkpoint checkpoint_crafted cli configs_oracle driver_stub formats fuzz golden inspect_cli link mutants oracle packing sources store store_cli tune_cli"
tests=yes benches=yes
for arg in "$@"; do
    case $arg in
        --no-tests) tests=no ;;
        --no-benches) benches=no ;;
        *) echo "stage.sh: unknown argument $arg; --no-tests and --no-benches are known" >&2; exit 2 ;;
    esac
done

rm -rf stage
mkdir -p stage/bin stage/tests stage/benches
log=$(mktemp) list=$(mktemp)
trap 'rm -f "$log" "$list"' EXIT

# Runs cargo with the arguments and lists "SOURCE EXECUTABLE" of what it built in $list.
build() {
    if ! cargo "$@" 2>"$log"; then cat "$log" >&2; exit 1; fi
    sed -n 's/^ *Executable \(unittests \)\{0,1\}\([^ ]*\) (\(.*\))$/\2 \3/p' "$log" >"$list"
}

# tests/emulator/main.rs -> tests-emulator, src/lib.rs -> src-lib.
name_of() {
    echo "$1" | sed -e 's/\.rs$//' -e 's:/main$::' -e 's:/:-:g' -e 's/^benches-//'
}

gather() {
    while read -r source executable; do
        strip -o "$1/$(name_of "$source")" "$executable"
    done <"$list"
}

build build --release --bins
target=${CARGO_TARGET_DIR:-target}
strip -o stage/bin/makaira "$target/release/makaira"
if [ $tests = yes ]; then
    set --
    for test in tests/*.rs tests/*/main.rs; do
        name=$(basename "${test%/main.rs}" .rs)
        case " $here " in
            *" $name "*) ;;
            *) set -- "$@" --test "$name" ;;
        esac
    done
    build test --release --no-run --lib --bins "$@"
    gather stage/tests
fi
if [ $benches = yes ]; then
    for bench in benches/*.rs; do
        build bench --no-run --bench "$(basename "$bench" .rs)"
        gather stage/benches
    done
fi
# Where the tests believe their sources to be.
pwd -P >stage/root

cat >stage/run-tests.sh <<'RUN'
#!/bin/sh
# Runs the staged test binaries in the repository's root and says how each ended. Arguments go to every
# binary, for instance --skip NAME. MAKAIRA_TEST_TIMEOUT: seconds for one binary (300).
cd "$(dirname "$0")/.." || exit 2
here=$(pwd -P)
root=$(cat stage/root)
# Tests look for their files where they were compiled.
if [ ! -e "$root" ]; then
    mkdir -p "$(dirname "$root")" && ln -s "$here" "$root" || exit 2
    echo "linked $root to $here"
fi
if [ ! -e "$root/target/release/makaira" ]; then
    mkdir -p "$root/target/release" && ln -s "$here/stage/bin/makaira" "$root/target/release/makaira"
fi
export CARGO_MANIFEST_DIR="$root" INSTA_WORKSPACE_ROOT="$root" INSTA_UPDATE=no INSTA_FORCE_PASS=0
failed=0
summary=
for binary in stage/tests/*; do
    name=$(basename "$binary")
    echo "== $name"
    timeout "${MAKAIRA_TEST_TIMEOUT:-300}" "$binary" --nocapture "$@" >"$binary.log" 2>&1
    status=$?
    grep -E "^skipped" "$binary.log" | sort -u
    result=$(grep -E '^test result' "$binary.log" | tail -1)
    if [ $status -ne 0 ]; then
        failed=$((failed + 1))
        tail -n 60 "$binary.log"
    fi
    summary="$summary
$name: exit $status; ${result:-no result}"
    rm -f "$binary.log"
done
echo "$summary"
echo "$failed test binaries failed"
[ $failed -eq 0 ]
RUN
chmod +x stage/run-tests.sh

find stage -type f -size +0 -exec du -k {} + | sort -n
kib=$(du -sk stage | cut -f1)
echo "stage/: $((kib / 1024)) MiB of at most $limit_mib"
if [ "$kib" -gt $((limit_mib * 1024)) ]; then
    echo "stage.sh: stage/ is too large; leave tests or benches out (--no-tests, --no-benches)" >&2
    exit 1
fi
