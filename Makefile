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
PROGRAMS := lazaret lazaret-runsc lazaret-init lazaret-escalate

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

# The suites in tests/ and the packages need the programs, real namespaces and, as ordinary user, subordinate ids; what is
# missing is an error where LAZARET_TEST_REQUIRE is set.
TESTTIMEOUT ?= 20m
ifeq ($(shell id -u),0)
test:
	@echo 'The tests are those of an ordinary user: .ci/run makes one and runs them on a clone of HEAD.'
	TARGETS=test .ci/run
else
test: all
	$(GO) test -run '^$$' ./... >/dev/null   # compiles on all processors
	$(GO) test -p 1 -timeout $(TESTTIMEOUT) ./...
endif

# The race detector needs cgo, and so a tag that keeps a C library out. The suites of real sandboxes run without it: the
# helpers confine themselves, which a cgo program cannot.
RACED := ./nsenter/... ./overlay/... ./supervisor/... ./sentry ./sentry/gitconfig ./sentry/gitindex ./sentry/ignore ./sentry/review \
	./sentry/route ./routes/control ./routes/dns ./routes/policy ./escalation ./escalation/rules ./escalation/wire

check: all
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); echo 'not gofmt-clean'; exit 1; }
	$(GO) vet ./...
	$(GO) tool staticcheck ./...
	CGO_ENABLED=1 $(GO) test -race -short -tags exclude_graphdriver_btrfs -timeout $(TESTTIMEOUT) $(RACED)
	@if curl -sfm 10 -o /dev/null https://vuln.go.dev/index/db.json; then $(GO) tool govulncheck ./...; else echo 'govulncheck: its database cannot be reached; not checked'; fi

bench: all
	$(GO) run ./tests/bench

install: all
	install -D -m 0755 bin/lazaret '$(DESTDIR)$(PREFIX)/bin/lazaret'
	install -D -m 0755 bin/lazaret-runsc '$(DESTDIR)$(PREFIX)/libexec/lazaret/lazaret-runsc'
	install -D -m 0755 bin/lazaret-init '$(DESTDIR)$(PREFIX)/libexec/lazaret/lazaret-init'
	install -D -m 0755 bin/lazaret-escalate '$(DESTDIR)$(PREFIX)/libexec/lazaret/lazaret-escalate'

uninstall:
	rm -f '$(DESTDIR)$(PREFIX)/bin/lazaret'
	rm -rf '$(DESTDIR)$(PREFIX)/libexec/lazaret'

clean:
	rm -rf bin
