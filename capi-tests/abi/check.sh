#!/usr/bin/env bash
# Compares the C ABI with the committed baseline (libcobweb.abi), on a build of the dev profile: optimised builds merge equal functions and hide changes.
# First a struct is broken on purpose and must be noticed, or a pass would mean nothing.
# usage: check.sh            compare
#        check.sh --update   write the baseline anew (at a release, or with the commit that changes the ABI)
set -euo pipefail
cd "$(dirname "$0")/../.."
here=capi-tests/abi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
target=${CARGO_TARGET_DIR:-target}
cargo rustc --quiet --locked --lib --crate-type staticlib
cc -shared -o "$work/libcobweb.so.0" -Wl,--whole-archive "$target/debug/libcobweb.a" -Wl,--no-whole-archive \
  -Wl,--version-script=include/libcobweb.map -Wl,-soname,libcobweb.so.0 -Wl,--gc-sections -lgcc_s -lpthread -lm -ldl -lc
# What the header does not show is no part of the ABI: Rust's own types are left out.
abidw --headers-dir include --drop-private-types --drop-undefined-syms --no-corpus-path --no-comp-dir-path --out-file "$work/now.abi" "$work/libcobweb.so.0"
if [ "${1:-}" = --update ]; then
  cp "$work/now.abi" "$here/libcobweb.abi"
  echo "baseline written"
  exit 0
fi
# cobweb_cqe.res moves by four bytes.
perl -0pe "s/(layout-offset-in-bits=')64('>\\s*<var-decl name='res')/\${1}96\$2/g" "$here/libcobweb.abi" > "$work/broken.abi"
cmp -s "$work/broken.abi" "$here/libcobweb.abi" && { echo "could not break a struct"; exit 1; }
rc=0; abidiff "$work/broken.abi" "$work/now.abi" > /dev/null || rc=$?
[ "$rc" -eq 4 ] || { echo "a broken struct must give 4, abidiff said $rc"; exit 1; }
rc=0; abidiff "$here/libcobweb.abi" "$work/now.abi" || rc=$?
[ "$rc" -eq 0 ] || { echo "the ABI differs from the baseline (abidiff $rc); decide, and run $0 --update with the commit that causes it"; exit 1; }
echo "abi: 2 passed, 0 failed"
