#!/usr/bin/env bash
# Installs into a scratch folder and checks what a packager and a C developer get: SONAME, symbol versions, no stray export, header == map == library,
# and a program built with pkg-config, shared and static.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
# Not /usr: pkg-config leaves that out of its answers.
make -s install PREFIX=/opt/cobweb DESTDIR="$root"
lib=$root/opt/cobweb/lib/libcobweb.so.0
readelf -d "$lib" | grep -q 'SONAME.*\[libcobweb.so.0\]' || { echo "no SONAME"; exit 1; }
readelf -d "$lib" | grep -q NODELETE || { echo "not linked with -z nodelete"; exit 1; }
exported=$(readelf -W --dyn-syms "$lib" | awk '$7 != "UND" && ($5 == "GLOBAL" || $5 == "WEAK") && $4 == "FUNC" {print $8}' | sort)
echo "$exported" | grep -v '@@COBWEB_0\.1$' && { echo "an exported symbol has no version, or another one"; exit 1; }
names=$(echo "$exported" | sed 's/@@.*//')
map=$(sed -n 's/^    \(cobweb_[a-z0-9_]*\);$/\1/p' include/libcobweb.map | sort)
header=$(grep -o 'cobweb_[a-z0-9_]*(' include/cobweb.h | tr -d '(' | sort -u | comm -12 - <(echo "$map"))
[ "$names" = "$map" ] || { echo "library and map differ:"; diff <(echo "$names") <(echo "$map"); exit 1; }
[ "$header" = "$map" ] || { echo "header and map differ:"; diff <(echo "$header") <(echo "$map"); exit 1; }
cat > "$root/t.c" <<'C'
#include <cobweb.h>
int main(void)
{
    cobweb_ctx *c = 0;
    if (cobweb_ctx_new(0, 0, &c, 0) != 0 || cobweb_ctx_start(c, 0) != 0) return 1;
    cobweb_ctx_free(c);
    return 0;
}
C
export PKG_CONFIG_PATH=$root/opt/cobweb/lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=$root
cc -o "$root/shared" "$root/t.c" $(pkg-config --cflags --libs cobweb)
LD_LIBRARY_PATH=$root/opt/cobweb/lib "$root/shared"
ldd "$root/shared" | grep -q cobweb || { echo "not linked to the shared library"; exit 1; }
mv "$root/opt/cobweb/lib/libcobweb.so" "$root/opt/cobweb/lib/hidden"
cc -o "$root/static" "$root/t.c" $(pkg-config --cflags --libs --static cobweb)
"$root/static"
ldd "$root/static" | grep -q cobweb && { echo "the static program needs the shared library"; exit 1; }
make -s -C capi-tests check ONLY=dlopen OUT="$root/dl" SO="$lib"
echo "install: $(echo "$map" | wc -l) symbols passed, 0 failed"
