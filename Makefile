# Installs the C library. The versioned shared object is linked from the static archive, because a cdylib cannot carry symbol versions
# (docs/abi.md). PREFIX, DESTDIR, LIBDIR as usual; CARGO_FLAGS for offline builds.

PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
BINDIR ?= $(PREFIX)/bin
DESTDIR ?=
CC ?= cc
CARGO ?= cargo
CARGO_FLAGS ?=
TARGET_DIR ?= $(or $(CARGO_TARGET_DIR),target)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
SONAME := libcobweb.so.0
SO := libcobweb.so.$(VERSION)
PRIVATE_LIBS := -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc

all: $(TARGET_DIR)/$(SO) $(TARGET_DIR)/cobweb.pc

.PHONY: all install uninstall check clean FORCE

# cargo decides whether anything has to be rebuilt.
$(TARGET_DIR)/release/libcobweb.a: FORCE
	$(CARGO) rustc --release --lib --crate-type staticlib --target-dir $(TARGET_DIR) $(CARGO_FLAGS)

$(TARGET_DIR)/$(SO): $(TARGET_DIR)/release/libcobweb.a include/libcobweb.map
	$(CC) -shared -o $@ $(LDFLAGS) -Wl,--whole-archive $(TARGET_DIR)/release/libcobweb.a -Wl,--no-whole-archive \
	  -Wl,--version-script=include/libcobweb.map -Wl,-soname,$(SONAME) -Wl,--gc-sections -Wl,-z,nodelete -Wl,-z,defs -lgcc_s -lpthread -lm -ldl -lc

$(TARGET_DIR)/cobweb.pc: Makefile Cargo.toml FORCE
	mkdir -p $(TARGET_DIR)
	printf '%s\n' 'prefix=$(PREFIX)' 'libdir=$(LIBDIR)' 'includedir=$(INCLUDEDIR)' '' 'Name: cobweb' \
	  'Description: Block storage for virtual machines' 'Version: $(VERSION)' \
	  'Libs: -L$${libdir} -lcobweb' 'Libs.private: $(PRIVATE_LIBS)' 'Cflags: -I$${includedir}' > $@

install: all
	install -d $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(INCLUDEDIR)
	install -m 644 include/cobweb.h $(DESTDIR)$(INCLUDEDIR)/cobweb.h
	install -m 755 $(TARGET_DIR)/$(SO) $(DESTDIR)$(LIBDIR)/$(SO)
	ln -sf $(SO) $(DESTDIR)$(LIBDIR)/$(SONAME)
	ln -sf $(SONAME) $(DESTDIR)$(LIBDIR)/libcobweb.so
	install -m 644 $(TARGET_DIR)/release/libcobweb.a $(DESTDIR)$(LIBDIR)/libcobweb.a
	install -m 644 $(TARGET_DIR)/cobweb.pc $(DESTDIR)$(LIBDIR)/pkgconfig/cobweb.pc

uninstall:
	rm -f $(DESTDIR)$(INCLUDEDIR)/cobweb.h $(DESTDIR)$(LIBDIR)/$(SO) $(DESTDIR)$(LIBDIR)/$(SONAME) \
	  $(DESTDIR)$(LIBDIR)/libcobweb.so $(DESTDIR)$(LIBDIR)/libcobweb.a $(DESTDIR)$(LIBDIR)/pkgconfig/cobweb.pc

check:
	$(MAKE) -C capi-tests check

clean:
	$(CARGO) clean --target-dir $(TARGET_DIR)
