# make reproduce   run every notebook, then build the site with what they found
# make test        run the tests
# make lint        check layout and code with ruff
# make docs        build the site, build/site/index.html, from docs/ and results/
# make tables      write the tables of README and docs from results/
# make stress      run the tests in depth: every architecture, combination, interruption and damaged file
# make lab         open JupyterLab at notebooks/00_start
# make clean       remove .venv and caches; results stay
#
# All but clean make .venv when it is missing, and again when pyproject.toml or constraints.txt changed.

VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
CANDIDATES := python3.11 python3.12 python3.13 python3 python
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
# as many test processes as there are cores, at most four; each keeps torch to one thread
TEST_FLAGS ?= -n auto --maxprocesses 4 --dist worksteal

.PHONY: help reproduce test lint docs tables stress lab clean

help:
	@sed -n 's/^# make/make/p' Makefile

reproduce: $(INSTALLED)
	@$(PYTHON) -m moelab reproduce; status=$$?; $(MAKE) --no-print-directory docs && exit $$status

# bytecode is kept: tests start a hundred processes
test: $(INSTALLED)
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PYTHON) -m pytest $(TEST_FLAGS)

lint: $(INSTALLED)
	@$(VENV)/bin/ruff format --check --quiet . && $(VENV)/bin/ruff check --quiet .

docs: $(INSTALLED)
	@$(PYTHON) -m sphinx -W --keep-going -q docs build/site && echo build/site/index.html

tables: $(INSTALLED)
	@$(PYTHON) docs/tables.py

stress: $(INSTALLED)
	@MOELAB_STRESS=1 OMP_NUM_THREADS=1 $(PYTHON) -m pytest $(TEST_FLAGS) --timeout 7200

lab: $(INSTALLED)
	@$(PYTHON) -m jupyterlab --allow-root --ServerApp.root_dir=. \
	  --LabApp.default_url=/lab/tree/notebooks/00_start.ipynb \
	  --FileContentsManager.post_save_hook=notebooks.strip.after_saving

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .hypothesis
	find moelab tests notebooks -name __pycache__ -prune -exec rm -rf {} +

# The stamp is touched last, so an installation that was cut off is taken up again.
$(INSTALLED): pyproject.toml constraints.txt
	@rm -f $@; \
	if ! { $(PYTHON) -c '$(SUITABLE)' && $(PYTHON) -m pip --version; } >/dev/null 2>&1; then \
	  python=; \
	  for candidate in $(CANDIDATES); do \
	    if $$candidate -c '$(SUITABLE)' >/dev/null 2>&1; then python=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "moelab needs Python 3.11, 3.12 or 3.13; none of $(CANDIDATES) is one." >&2; exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$($$python --version)"; \
	  rm -rf $(VENV); \
	  if ! $$python -m venv $(VENV) >$(VENV).log 2>&1; then \
	    cat $(VENV).log >&2; rm -rf $(VENV) $(VENV).log; \
	    echo "$$python cannot make virtual environments; on Debian or Ubuntu: apt-get install python3-venv" >&2; \
	    exit 1; \
	  fi; \
	  rm -f $(VENV).log; \
	fi; \
	echo "Installing moelab and what it needs into $(VENV); the first time takes minutes"; \
	if [ -t 1 ]; then quiet=; else quiet=--quiet; fi; \
	$(PYTHON) -m pip install $$quiet --disable-pip-version-check -c constraints.txt -e '.[lab,ane,test,docs]' || exit 1; \
	if git rev-parse --git-dir >/dev/null 2>&1; then \
	  git config filter.nbstripout.clean '"$(PYTHON)" -m notebooks.strip'; \
	fi; \
	touch $@
