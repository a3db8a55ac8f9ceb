# make demo        trains a model that does not fit into the memory it is given    ARGS="--steps 30 --verify"
# make test        native and Python tests                                       PYTEST_ARGS="-k lease"
# make test-more   what CI runs beside `make test`: parsers, ring, server and store under AddressSanitizer, long tests (label and marker `more`), a cover of `make conformance`, a twentieth of eight soak parts
# make conformance small programs of every kind with memd and with plain PyTorch, bit for bit   ARGS="--only LSTM" or --write for docs/conformance.md
# make bench       this machine's figures, as JSON under tests/bench/out, and what changed   ARGS="--only memd_bench_io"
# make peers       the same GPT-2 trained by plain PyTorch, DeepSpeed and memd, side by side   ARGS="--rounds 1 --only plain memd"
# make soak        the long runs: hundreds of kills, a million power cuts; goes on where it was ended   ARGS="--list"
# make mutants     plants the bugs of tests/mutants/bugs.toml, one after the other, and sees that the tests catch each   ARGS="--only lease"
# make sanitize    the native tests under AddressSanitizer with UBSan, then under ThreadSanitizer
# make matrix      tests with each interpreter at hand, and the oldest and newest packages that pyproject.toml admits (an hour)   ARGS="--only 3.12-lowest"
# make lint        formatting, spelling, types; `make format` cures the first
# make tidy        clang-tidy (slow)
# make house       methods, public data and files of each class, lengths of functions, and what breaks a limit
# make regenerate  the committed protobuf code, type stub, docs/reference.md and the operator's copy of the alerts
# make manual      man pages and shell completion in build/manual, laid out as /usr/share
# make wheels      wheels for Linux on x86_64 and aarch64 in dist/   PYTHONS="python3.11 python3.13"
# make try-wheels  installs them where no compiler and no network is, and trains there (root; an hour)   ARGS="bookworm"
# make deb         dist/memd_*.deb: the daemon for this Debian, with systemd units, man pages and completion
# make try-deb     installs that of the release before under a real systemd, restarts, upgrades to it and purges it, under a trainer (root; half an hour)
# make try-containers  builds the images of deploy/container with buildah, and trains in them with podman (root)   ARGS="--kills 3"
# make operator    what an operator does, from an empty root without compiler to a dropped job: wheel, service, Prometheus, a fence, an upgrade (root)   ARGS=--quick
# make clean       what a build leaves behind; `make distclean` .venv too
#
# Each does all its set-up: see deploy/setup/setup.sh for PYTHON, TORCH and TORCH_INDEX.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-more conformance bench peers soak mutants sanitize matrix lint format tidy house regenerate manual wheels try-wheels deb try-deb try-containers operator clean distclean

export PYTHON TORCH TORCH_INDEX

SETUP := deploy/setup/setup.sh
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"
SANITIZERS := address thread
NATIVE_SOURCES = $(wildcard native/*/*.h native/*/*.cc native/store/*/*.h native/store/*/*.cc tests/native/*.h tests/native/*.cc \
  tests/native/*/*.h tests/native/*/*.cc tests/device/native/*.h tests/device/native/*.cc)
# A file of tests stays in one of the two processes, and so does the daemon that its tests share. Folders go in the
# order of their names: tests/unit, whose files are short, is last, so both processes end within seconds.
# passive: torch's threads that spin for the next operation take the processors from the other process. durations: the
# slowest are the first to look at when `make test` takes longer than 20 minutes.
TWO_PYTESTS := OMP_WAIT_POLICY=passive python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=30
# In processes of their own: they install a device. A file's tests may run in both, as some files take minutes; each
# process then starts the file's daemon. Not where PYTEST_ARGS names files. 5: selects none.
TWO_DEVICE_PYTESTS := OMP_WAIT_POLICY=passive python -m pytest -n 2 --dist worksteal --durations=30 tests/device
DEVICE_TESTS = $(if $(findstring tests/,$(PYTEST_ARGS)),true,$(IN_VENV) $(TWO_DEVICE_PYTESTS))

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

demo:
	@$(SETUP) demo
	$(IN_VENV) memd demo $(ARGS)

test:
	@$(SETUP) test
	@started=$$SECONDS; \
	ctest --test-dir build/release --label-exclude "more|soak" --output-on-failure --no-tests=error -j 2; \
	$(IN_VENV) $(TWO_PYTESTS) -m "not more and not soak" $(PYTEST_ARGS); \
	$(DEVICE_TESTS) -m "not more and not soak" $(PYTEST_ARGS) || (($$? == 5)); \
	echo "make test: $$((SECONDS - started)) s after set-up"

# The whole soak, all cells of the conformance matrix and ThreadSanitizer take too long for CI: people run them before a
# release. Cells run here, by the matrix's own program and not by pytest, which has the tests of the matrix itself.
test-more: PURPOSE := test-more
test-more: SANITIZERS := address
test-more: SANITIZE_WITHOUT := null,alignment
test-more: SANITIZED := catalogue_test check_test extent_test half_written_test job_limits_test ledger_test ring_test \
  server_test shard_store_test store_beside_test volume_test
test-more: sanitize
	ctest --test-dir build/release --label-regex more --output-on-failure --no-tests=error -j 2
	$(IN_VENV) $(TWO_PYTESTS) -m "more and not soak"
	$(IN_VENV) $(TWO_DEVICE_PYTESTS) -m "more and not soak"
	$(IN_VENV) python -m tests.numerics.conformance --ci
	$(IN_VENV) python -m tests.soak.soak --percent 5 --only kill-daemon-fp32-step-short \
	  kill-trainer-fp32-step-short kill-both-bf16-step-resident killed-clients power-cuts power-cuts-early \
	  power-cuts-loads damaged-images

conformance:
	@$(SETUP) test
	$(IN_VENV) python -m tests.numerics.conformance $(ARGS)

bench:
	@$(SETUP) test
	@tests/bench/peers/set_up.sh
	@status=0; $(IN_VENV) python tests/bench/run_all.py $(ARGS) || status=1; \
	$(IN_VENV) python tests/bench/compare_results.py || status=1; exit $$status

peers:
	@$(SETUP) test
	@tests/bench/peers/set_up.sh
	@mkdir -p tests/bench/out
	@status=0; for size in "60m fp32" "311m bf16"; do \
	  $(IN_VENV) python tests/bench/peers/compare.py --model $${size% *} --dtype $${size#* } \
	    --json "tests/bench/out/peers_$${size% *}_$${size#* }.json" $(ARGS) || status=1; \
	done; \
	$(IN_VENV) python tests/bench/compare_results.py || status=1; exit $$status

# With arguments only the parts that they name.
soak:
	@$(SETUP) test
	@[[ -n "$(ARGS)" ]] || { \
	  ctest --test-dir build/release --label-regex soak --output-on-failure --no-tests=error -j 2; \
	  $(IN_VENV) $(TWO_PYTESTS) -m soak; $(IN_VENV) $(TWO_DEVICE_PYTESTS) -m soak; }
	$(IN_VENV) python -m tests.soak.soak $(ARGS)

mutants:
	@$(SETUP) test
	$(IN_VENV) python -m tests.mutants.run $(ARGS)

# -O0 -g1: g++ takes 1.6 to 3.7 times as long for -O1 with UBSan, and reports have their lines all the same. The checks
# that `make test-more` leaves out are a third of the compiler's time; AddressSanitizer finds null pointers too.
sanitize:
	@$(SETUP) $(or $(PURPOSE),test)
	@for sanitizer in $(SANITIZERS); do \
	  cmake -S native -B build/$$sanitizer -G Ninja -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS="-O0 -g1" \
	    -DMEMD_SANITIZE=$$sanitizer -DMEMD_SANITIZE_WITHOUT=$(SANITIZE_WITHOUT) \
	    -DMEMD_TESTS=ON -DMEMD_BINDING=OFF >/dev/null; \
	  cmake --build build/$$sanitizer -j 2 --target $(or $(SANITIZED),all); \
	  if [[ -z "$(SANITIZED)" ]]; then \
	    ctest --test-dir build/$$sanitizer --output-on-failure --no-tests=error -j 2; \
	  else \
	    printf '%s\n' $(SANITIZED) | xargs -P 2 -I{} env build/$$sanitizer/{} --gtest_brief=1; \
	  fi; \
	done

# .venv runs it; interpreters and packages that are tested are in build/matrix.
matrix:
	@$(SETUP) demo
	$(IN_VENV) python -m tests.compat.matrix $(ARGS)

lint:
	@$(SETUP) lint
	@status=0; for check in "ruff check" "ruff format --check" \
	    "clang-format --dry-run -Werror $(NATIVE_SOURCES)" codespell mypy; do \
	  echo "$${check%% native*}"; $(IN_VENV) $$check || status=1; \
	done; exit $$status

format:
	@$(SETUP) lint
	$(IN_VENV) ruff check --fix --select I
	$(IN_VENV) ruff format
	$(IN_VENV) clang-format -i $(NATIVE_SOURCES)

tidy:
	@$(SETUP) tidy
	@$(IN_VENV) cmake -S native -B build/tidy -G Ninja -DMEMD_UNITY=OFF >/dev/null
	$(IN_VENV) clang-tidy -p build/tidy --quiet $(wildcard native/*/*.cc native/store/*/*.cc)

house:
	@$(SETUP) test
	@$(IN_VENV) python -m tests.house $(ARGS)

regenerate:
	@$(SETUP) test
	$(IN_VENV) python proto/regenerate.py
	$(IN_VENV) python native/python/regenerate_stub.py
	$(IN_VENV) python -m tests.unit.reference
	$(IN_VENV) python -m tests.unit.prometheus_rule

manual:
	@$(SETUP) test
	$(IN_VENV) python deploy/manual.py build/manual

wheels:
	deploy/wheels/build.sh $(ARGS)

try-wheels:
	deploy/wheels/try.sh $(ARGS)

deb:
	deploy/debian/build.sh

# Without .venv: it needs the package, and a torch in the root that it makes.
try-deb:
	/usr/bin/python3 -m tests.soak.debian_package $(ARGS)

try-containers:
	@$(SETUP) test
	deploy/container/build.sh
	$(IN_VENV) python -m tests.soak.containers $(ARGS)

# The programs that it needs are its own to name: with --quick .venv, else a root that it makes.
operator:
	tests/e2e/operator.sh $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/bench/out
	find memd client proto native tests -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf .venv
