"""`archipelago export`: write a run's newest parameters as files that other programs load."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from archipelago.broker.errors import ConfigError, DataError
from archipelago.broker.files import staged_folder
from archipelago.broker.manifest import Manifest
from archipelago.broker.observe.progress import progress
from archipelago.broker.process import keep_compiled, print_json
from archipelago.broker.shards.transport import opened
from archipelago.islands.sync.evaluator import newest_merged
from archipelago.ops.run_source import RunSource, open_run
from archipelago.ops.settings import say
from archipelago.ops.weights.safetensors_files import CONFIG_FILE, OWN_KIND, TOKENIZER_KEY

if TYPE_CHECKING:
    from archipelago.islands.data.tokenizer import TextTokenizer

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ExportOptions(RunSource):
    """Write a run's newest parameters as safetensors, for Hugging Face's `transformers` and other programs."""

    out: Path
    """The folder to write. It must be empty or not exist."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the numbers in the file."""
    json: bool = False
    """Print one JSON object."""


def main(options: ExportOptions) -> int:
    require_new(options.out)
    keep_compiled()
    with progress("reading the parameters"):
        found = find(options.url, options.run)
    with progress(f"writing {options.out}"):
        kind = write(found, options.out, options.dtype)
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    if options.json:
        print_json({"run": found.manifest.run, "round": found.round, "step": found.step, "origin": found.origin,
                    "model_type": kind, "dtype": options.dtype,
                    "parameters": found.manifest.parameters,
                    "frozen_parameters": found.manifest.frozen_parameters,
                    "bytes": size, "folder": str(options.out)})  # fmt: skip
        return 0
    say(f"run {found.manifest.run!r} at round {found.round:,}, step {found.step:,}, from {found.origin}: "
        f"{found.manifest.parameters:,} parameters, {options.dtype}, in {options.out} ({size:,} bytes)")  # fmt: skip
    for line in _uses(found, options.out, kind):
        say(f"  {line}")
    return 0


def _uses(found: RunParameters, out: Path, kind: str) -> Iterator[str]:
    """Yield lines that say how to use the export."""
    if found.manifest.frozen:
        yield (
            f"only the trained tensors are in it; {found.manifest.frozen_parameters:,} frozen parameters are those of "
            "the base model, which the run does not have"
        )
    if kind != OWN_KIND:
        yield f"in transformers:  AutoModelForCausalLM.from_pretrained('{out}'), or the class of your model"
    if found.manifest.config.has_user_loops:
        yield f"in a script:  safetensors.numpy.load_file('{out / WEIGHTS_FILE}') has the tensors by name"
        return
    yield f"continue from here:  archipelago up --from {out} --model.size {found.manifest.config.model.size}"


# -- the parameters of a run ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunParameters:
    """A run's newest published parameters, the last round and step in them, and where they were found, in words."""

    manifest: Manifest
    params: dict[str, Any]
    round: int
    step: int
    origin: str


def find(source: str | None, run: str | None) -> RunParameters:
    """Return the newest published parameters of the run that a user names (`open_run`)."""
    with open_run(source, run) as found:
        manifest, whole = opened(found.transport)
        merged = newest_merged(whole, manifest)
        return RunParameters(manifest, manifest.named(merged.vectors), merged.round, merged.step, found.origin)


def tokenizer_of(manifest: Manifest) -> TextTokenizer:
    """Return the tokenizer of the run's model.

    Raises DataError if this machine does not have the corpus that holds it (`data.missing`), or has one of that name
    with another tokenizer (`tokenizer.different`).
    """
    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.data.tokenizer import byte_tokenizer

    if not manifest.corpus.tokenizer:
        return byte_tokenizer()
    corpus = open_corpus(manifest.corpus.name)
    if corpus.tokenizer != manifest.corpus.tokenizer:
        raise DataError(
            f"the corpus {corpus.name!r} on this machine has another tokenizer than the run's",
            "Copy the run's corpus to this machine.",
            code="tokenizer.different",
        )
    return corpus.open_tokenizer()


# -- writing ----------------------------------------------------------------------------------------------------------


def require_new(out: Path) -> None:
    """Check that nothing would be overwritten. Raises ConfigError (`export.exists`)."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} exists and is not empty", "Name another folder with --out, or delete it.", code="export.exists"
        )
    if out.is_symlink() or out.is_mount() or (out.exists() and out.samefile(".")):
        raise ConfigError(
            f"{out} is a link, a mount or the current folder, which cannot be replaced",
            "Name a new folder with --out.", code="export.exists",
        )  # fmt: skip


def write(found: RunParameters, out: Path, dtype: str) -> str:
    """Write the folder, completely or not at all. Return the model type: that of `transformers`, or our own.

    Raises:
        ConfigError: The disk does not take it (`file.disk-full`).
        OSError: The folder cannot be written.
    """
    tokenizer = None if found.manifest.config.has_user_loops else tokenizer_of(found.manifest)
    config = config_of(found, dtype)
    with staged_folder(out) as stage:
        _write_json(stage / CONFIG_FILE, config)
        path, meaning = stage / WEIGHTS_FILE, {TOKENIZER_KEY: tokenizer.meaning} if tokenizer else {}
        is_ours = tokenizer is not None and config["model_type"] == "llama"
        _write_safetensors(path, found.params, dtype, meaning, is_llama=is_ours)
        path.chmod((stage / CONFIG_FILE).stat().st_mode)  # Safetensors lets only the user read the file.
        if tokenizer is not None:
            _write_tokenizer(stage, tokenizer, found.manifest.config.data.sequence_length)
    return str(config["model_type"])


def config_of(found: RunParameters, dtype: str) -> dict[str, Any]:
    """Return `config.json`: a Llama's for a dense model, that of a model of `transformers`, else our own.

    All say where the parameters come from.
    """
    from archipelago.islands.models.llama import DENSE
    from archipelago.islands.models.llama import config_of as llama_config

    manifest = found.manifest
    model, positions = manifest.config.model, manifest.config.data.sequence_length
    origin = {"size": model.size, "run": manifest.run, "round": found.round, "step": found.step,
              "config_digest": manifest.config.digest(), "uid": manifest.uid}  # fmt: skip
    if manifest.config.has_user_loops:  # only its scripts know its data
        origin |= {"frozen": manifest.frozen} if manifest.frozen else {}
        # Without the frozen tensors, the file is not the model that these settings describe.
        own = {} if manifest.frozen or not manifest.model_config else json.loads(manifest.model_config)
        return {"model_type": OWN_KIND, **own, "torch_dtype": dtype, OWN_KIND: origin}
    origin |= {"vocabulary": model.vocabulary, "sequence_length": positions, "corpus": manifest.corpus.name,
               "corpus_digest": manifest.corpus.digest}  # fmt: skip
    if size := DENSE.get(model.size):
        return {**llama_config(size, model.vocabulary, positions, dtype), OWN_KIND: origin}
    return {"model_type": OWN_KIND, "torch_dtype": dtype, OWN_KIND: origin}


def _write_safetensors(
    path: Path, params: dict[str, Any], dtype: str, metadata: Mapping[str, str], *, is_llama: bool
) -> None:
    import ml_dtypes
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    from archipelago.islands.models.llama import to_llama

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    tensors = {}
    for name, exact in params.items():
        value, place = np.asarray(exact), to_llama(name) if is_llama else None
        laid_out = np.ascontiguousarray(value.T) if place and place.transposed else value
        tensors[place.name if place else name] = laid_out.astype(kind)
    try:
        save_file(tensors, str(path), metadata={"format": "pt", **metadata})
    except SafetensorError as error:  # It wraps errors of the disk in its own.
        remedy = "Free some space, or choose a folder on another disk."
        raise ConfigError(f"{path} cannot be written ({error})", remedy, code="file.disk-full") from error


def _write_tokenizer(folder: Path, tokenizer: TextTokenizer, positions: int) -> None:
    from archipelago.islands.data.tokenizer import FILE

    (folder / FILE).write_text(tokenizer.to_json(), encoding="utf-8", newline="\n")
    _write_json(folder / "tokenizer_config.json",
                {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions,
                 "clean_up_tokenization_spaces": False, "add_bos_token": False, "add_eos_token": False})  # fmt: skip
    _write_json(folder / "generation_config.json",
                {"do_sample": True, "temperature": 0.8, "bos_token_id": None, "eos_token_id": None})  # fmt: skip


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
