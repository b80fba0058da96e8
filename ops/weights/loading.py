"""`archipelago.load`: put an export, a checkpoint or a live run's newest parameters into the caller's own model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from archipelago.broker.config import OWN_MODEL
from archipelago.broker.errors import DataError, MismatchError
from archipelago.broker.frozen import FrozenTensor
from archipelago.broker.invitation import names_redis
from archipelago.broker.manifest import Tensor
from archipelago.broker.messages import adapter
from archipelago.broker.shards.transport import opened
from archipelago.islands.models.llama import from_llama
from archipelago.islands.sync.evaluator import newest_merged
from archipelago.islands.user_loop.following import Published
from archipelago.ops.run_source import open_run
from archipelago.ops.weights.safetensors_files import OWN_KIND, damaged, files_at, read_config

if TYPE_CHECKING:
    from archipelago.islands.models.llama import Names

#: The dtypes of the numbers in a file that are read.
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def load(source: str | Path | None, like: Any = None, *, run: str | None = None, names: Names | None = None) -> Any:
    """Put parameters into a tree or a module.

        model = archipelago.load("export/", like=model)

    Args:
        source: A `.safetensors` file, or a folder with some, such as `archipelago export` writes; the folder or bucket
            of a run or of its checkpoints, or its name; or the URL of a Redis or a join file, for the newest parameters
            of a run that trains. None for $ARCHIPELAGO_URL.
        like: As in `archipelago.follow`: a `torch.nn.Module`, which is changed in place; any pytree of arrays, of
            which a new one is made; or None for float32 arrays of numpy by name.
        run: The name of the run, where there are several.
        names: As in `archipelago.follow`.

    Returns:
        The module, the new tree, or the arrays by name.

    Raises:
        MismatchError: `like` has other tensors (`loop.other-tensors`, `loop.other-frozen`).
        DataError: The file is damaged (`weights.damaged`), or there is none (`weights.missing`).
        ConfigError: There is no checkpoint (`checkpoint.missing`), or nothing is named.
        BrokerError: The Redis cannot be reached, or has no such run.
    """
    path = None if source is None or names_redis(str(source)) else Path(source)
    if path is not None and (path.suffix == ".safetensors" or any(path.glob("*.safetensors"))):
        return _of_files(path, like, names)
    with open_run(None if source is None else str(source), run) as found:
        manifest, whole = opened(found.transport)
        fill = Published.of(manifest).filling(like, names)  # first, because the parameters may be large
        return fill(manifest.named(newest_merged(whole, manifest).vectors))


def _of_files(path: Path, like: Any, names: Names | None) -> Any:
    files = files_at(path)
    config = read_config(files[0].parent)
    own = config.get(OWN_KIND) or {}
    own = own if isinstance(own, dict) else {}
    read = [pair for file in files for pair in _read(file).items()]
    named = dict(read)
    if len(named) < len(read):
        raise DataError(
            f"the files in {path} hold a tensor of one name twice", "Name one file.", code="weights.damaged"
        )
    try:
        frozen = adapter(tuple[FrozenTensor, ...]).validate_python(own.get("frozen", ()))
    except ValueError as error:
        raise damaged(path, error) from None

    def filled(named: Mapping[str, NDArray[np.float32]]) -> Any:
        tensors = [Tensor(name, values.shape) for name, values in named.items() if values.size]  # as in runs
        return Published(str(path), str(own.get("run", path)), tensors, frozen).filling(like, names)(named)

    try:
        return filled(named)
    except MismatchError:
        if config.get("model_type") != "llama" or own.get("size", OWN_MODEL) == OWN_MODEL:
            raise
    # Our dense models are exported as Llamas, which have other names and layouts.
    places = {name: from_llama(name) for name in named}
    return filled({places[name].name: v.T if places[name].transposed else v for name, v in named.items()})


def _read(file: Path) -> Mapping[str, NDArray[np.float32]]:
    """Return the floating-point tensors of a file. Raises DataError (`weights.damaged`)."""
    from safetensors import SafetensorError, deserialize

    try:
        found = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from None
    return {
        name: np.frombuffer(each["data"], _DTYPES[each["dtype"]]).reshape(each["shape"]).astype(np.float32)
        for name, each in found
        if each["dtype"] in _DTYPES
    }
