# make            build into bin/
# make enter      build, then open a shell in the sandbox on the work tree where make was called
# make test       everything that the tests need, then all of them
# make check      vet, staticcheck, race tests, govulncheck where its database can be reached
# make bench      measurements as ratios, in one run
# make install    PREFIX=/usr/local  DESTDIR=

export CGO_ENABLED := 0
GO      ?= go
PREFIX  ?= /usr/local
VERSION ?= $(shell git describe --always --dirty --tags 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X lazaret.dev/lazaret/nsenter.Version=$(VERSION) -X gvisor.dev/gvisor/runsc/version.version=lazaret-$(VERSION)
GOBUILD := $(GO) build -buildvcs=false -ldflags '$(LDFLAGS)'
PROGRAMS := lazaret lazaret-runsc lazaret-init

# Where make was called: with -C, make changes directory and PWD keeps the caller's.
CALLER := $(or $(PWD),$(CURDIR))

.PHONY: all enter test check bench install uninstall clean $(PROGRAMS)

all: $(PROGRAMS)

# Go's build cache decides what has changed, so these are always asked.
$(PROGRAMS):
	@mkdir -p bin
	$(GOBUILD) -o bin/$@ ./cmd/$@

enter: all
	@cd '$(CALLER)' && '$(CURDIR)/bin/lazaret' enter $(PROFILE)
