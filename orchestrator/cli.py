"""The command line: a verb, then Hydra overrides. Errors of the user are sentences and exit code 2."""

import logging
import os
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from orchestrator import engine_env
from orchestrator.cluster.slurm import SlurmError, available
from orchestrator.config.compose import CONFIG_NAME, ConfigError, conf_dir, group_options, parse_override
from orchestrator.config.planning import Plan, plan
from orchestrator.provenance import ProvenanceError
from orchestrator.show import console, show_plan
from orchestrator.store import Store, StoreError
from orchestrator.verbs.arguments import UsageError, one_name, store_and_names

USAGE, INTERNAL, INTERRUPTED, CUT_OFF = 2, 3, 130, 141
HELP_WIDTH = 100
# Answered by Hydra itself, without planning anything.
HYDRA_FLAGS = {"--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc", "--version"}
VERBS = {
    "run": "run what is missing, judge, report (the default); on Slurm only with --watch, else it submits",
    "plan": "validate and show layout, memory, steps, checks and scripts; run nothing, write nothing",
    "submit": "put the missing cells on a Slurm cluster and return; `run --watch` later waits and reports",
    "status": "what the cells of all runs are doing, or those of `status NAME`",
    "runs": "the runs in the store, newest first: when, how many cells, their verdicts, where",
    "logs": "`logs NAME [CELL]`: what driver and ranks of a cell wrote, with --follow as they do; `logs --help`",
    "cancel": "`cancel NAME [CELL]`: end what waits or runs; `cancel --help`",
    "resume": "`resume NAME`: run what a run lacks, and what was cancelled or the cluster broke; `resume --help`",
    "judge": "`judge NAME`: judge the records of a run again with the rules of today",
    "report": "`report NAME`: write and show the report of a run again",
    "faults": "known failures, and where each was last caught; `faults --run` proves all; `faults --help`",
    "engine": "`engine NAME`: install the environment of a foreign engine; alone: show those there are",
}
EXAMPLES = """\
  python -m orchestrator +exp=kimi_k3_refit                     the whole table of one experiment
  python -m orchestrator plan +exp=kimi_k3_refit model=kimi_k3 cluster=gb200
  python -m orchestrator -m load_path=layerwise,direct parallelism=tp2,tp2_dp2_ep4
  python -m orchestrator load_path=layerwise code.candidate.faults=[NAME]
  python -m orchestrator 'code.base.commit="HEAD~1"'             two versions, the same cell
  python -m orchestrator plan --cfg job +exp=kimi_k3_refit       the composed config, by Hydra
  python -m orchestrator judge kimi_k3_refit                     its latest run"""


def main(argv: Sequence[str] | None = None) -> None:
    sys.exit(_run(list(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> int:
    """The exit code: 0 all PASS, 1 any FAIL, 2 invalid, 3 any ERROR, 4 otherwise undecided."""
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        count = len(error.problems)
        print(f"{count} problem{'s' if count > 1 else ''}; nothing was run or submitted.", file=sys.stderr)
        return USAGE
    except (
        UsageError,
        StoreError,
        ProvenanceError,
        SlurmError,
        engine_env.EngineEnvironmentError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("Interrupted. Finished cells are kept; the same command goes on from here.", file=sys.stderr)
        return INTERRUPTED
    except (
        BrokenPipeError
    ):  # of `| head`; what is left to write goes nowhere, else Python fails again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CUT_OFF
    except Exception:
        logging.getLogger(__name__).exception("This is a defect of the orchestrator, not of your config.")
        return INTERNAL  # Python's own 1 would say FAIL
    return code


def _dispatch(argv: list[str]) -> int:
    verb, rest = _verb(argv)
    if HYDRA_FLAGS & {argument.partition("=")[0] for argument in rest}:
        return _ask_hydra(rest)
    if verb == "faults":
        return _faults(rest)
    if verb in ("runs", "logs", "cancel", "resume"):
        return int(import_module(f"orchestrator.verbs.{verb}").main(rest))
    options, words = _options(rest)
    if options.help:
        print(help_text())
        return 0
    if verb in ("status", "judge", "report"):
        return _on_run(verb, words)
    if verb == "engine":
        return _engine(words)
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise UsageError(
                f"{word!r} is neither a verb nor an override: the verbs are {', '.join(VERBS)}, overrides look like "
                "key=value or +exp=NAME."
            )
    made = plan(words, options.multirun, options.config_dir)
    if options.watch and verb != "run":
        raise UsageError(f"--watch is an option of run, not of {verb}.")
    return _PLANNING[verb](made, argv, options.watch)


def _verb(argv: list[str]) -> tuple[str, list[str]]:
    """The first word that is a verb, wherever flags stand."""
    for place, word in enumerate(argv):
        if not word.startswith("-"):
            return (word, argv[:place] + argv[place + 1 :]) if word in VERBS else ("run", argv)
    return "run", argv


def _options(arguments: list[str]) -> tuple[Namespace, list[str]]:
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-cd", "--config-dir")
    parser.add_argument("--watch", action="store_true")
    options, words = parser.parse_known_args(arguments)
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        raise UsageError(f"{unknown[0]} is not an option; see --help.")
    return options, words


def _plan(made: Plan, _argv: list[str], _watch: bool) -> int:
    show_plan(console(), made, Store(made.store))
    return 0


def _run_plan(made: Plan, argv: list[str], watch: bool) -> int:
    from orchestrator import experiment

    if any(one.cell["cluster"]["kind"] == "slurm" for one in made.cells) and not available():
        raise UsageError(
            "sbatch is not on the PATH: submit from a login node of the cluster, or set cluster=local."
        )
    store, out = Store.open(made.store), console()
    return experiment.run(store, experiment.start(store, made, argv), out, watch)


def _submit(made: Plan, argv: list[str], watch: bool) -> int:
    kinds = {one.cell["cluster"]["kind"] for one in made.cells}
    if kinds != {"slurm"}:
        raise UsageError(
            f"submit needs a Slurm cluster, and cluster.kind is {', '.join(sorted(kinds))}: use run."
        )
    return _run_plan(made, argv, watch)


_PLANNING: dict[str, Callable[[Plan, list[str], bool], int]] = {
    "plan": _plan,
    "run": _run_plan,
    "submit": _submit,
}


def _on_run(verb: str, words: list[str]) -> int:
    """status, judge and report: a run by name, and perhaps store=PATH."""
    from orchestrator import experiment
    from orchestrator.verbs.status import show_status

    (store, names), out = store_and_names(verb, words), console()
    if verb == "status":
        return show_status(store, names, out)
    folder = store.find_experiment(one_name(verb, store, names))
    return (
        experiment.judge(store, folder, out)
        if verb == "judge"
        else experiment.write_verdict(store, folder, out)
    )


def _faults(arguments: list[str]) -> int:
    from orchestrator.verbs import faults

    flags = {argument for argument in arguments if argument.startswith("-")}
    if flags & {"-h", "--help"}:
        print(faults.HELP)
        return 0
    if unknown := sorted(flags - {"--run", "--pairs", "--sample"}):
        raise UsageError(f"{unknown[0]} is not an option of faults; see faults --help.")
    words = [argument for argument in arguments if argument not in flags]
    given = [parse_override(word) for word in words if "=" in word]
    values = {o.key_or_group: str(o.input_line).partition("=")[2] for o in given}
    names = [word for word in words if "=" not in word]
    return faults.main(names, values, flags, console())


def _engine(names: list[str]) -> int:
    from orchestrator import engine_install

    if len(names) > 1:
        raise UsageError(f"engine takes one name, not {len(names)}.")
    if not names:
        engine_install.show(console())
        return 0
    python = engine_install.install(names[0], console())
    console().print(f"{names[0]} is installed: {python}", soft_wrap=True, markup=False)
    return 0


def _ask_hydra(arguments: list[str]) -> int:
    """--cfg, --info and shell completion, as every Hydra application answers them."""
    import hydra

    import orchestrator.config.schema  # noqa: F401  # registers the schema that config.yaml names

    @hydra.main(config_path=str(conf_dir()), config_name=CONFIG_NAME, version_base="1.3")
    def ask(_config: Any) -> None:
        return None

    saved, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        ask()
    except SystemExit as stopped:
        return USAGE if stopped.code else 0
    finally:
        sys.argv = saved
    return 0


def _options_of(group: str, options: Sequence[str]) -> str:
    """`group=a|b|c`, over several lines where they are many."""
    head = f"  {'+' if group == 'exp' else ''}{group}="
    lines = textwrap.wrap("| ".join(options), HELP_WIDTH - len(head))
    return head + f"\n{' ' * len(head)}".join(line.replace("| ", "|") for line in lines)


def help_text() -> str:
    verbs = "\n".join(f"  {name:8} {text}" for name, text in VERBS.items())
    groups = "\n".join(_options_of(name, options) for name, options in group_options().items())
    return f"""\
Does an engine that loads or updates its weights end up exactly as after a fresh start, as accurate, as fast?

python -m orchestrator [VERB] [-m] [--config-dir DIR] [--watch] OVERRIDES...

Verbs
{verbs}

Config groups and their options (in {conf_dir()})
{groups}

Any value can be set: key=value, lists as key=[a,b]; +exp=NAME lays an experiment over everything; -m makes
one cell of each combination of comma-separated values. store=PATH (default runs) is where results are kept;
finished cells are reused unless rerun=true. On Slurm a run returns once all is submitted; with --watch it
stays, tries again what the cluster broke, and ends with the verdict.

Examples
{EXAMPLES}

Exit codes: 0 all PASS, 1 any FAIL, 2 invalid config or usage, 3 any ERROR, 4 else INCONCLUSIVE or NOT_RUN"""
