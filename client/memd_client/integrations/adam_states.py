"""States of Adam in a checkpoint, looked at before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memd_client.connection.shard import MAXIMUM, MOMENTS
from memd_client.errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path

_NEEDED = ("step", *(name for name in MOMENTS if name != MAXIMUM))


def refuse_other_states(found: Any, optimizer: Any, path: Path) -> None:
    """
    Args:
        found: of torch's `state_dict()` of an optimizer.
        optimizer: that it is to be loaded into.

    Raises:
        InvalidArgument: it is of another optimizer, or of other parameters.
    """
    try:
        groups = [list(group["params"]) for group in found["param_groups"]]
        states: dict[Any, dict[str, Any]] = dict(found["state"])
        kept = {key: set(state) for key, state in states.items() if state}
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{path} has no state of an optimizer of torch: {error}") from error
    shapes = [
        [tuple(parameter.shape) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]
    sizes, wanted = [len(group) for group in groups], [len(group) for group in shapes]
    if sizes != wanted:
        raise InvalidArgument(
            f"{path} has the state of an optimizer whose groups have {sizes} parameters, and this "
            f"one's have {wanted}: it is of another model or optimizer"
        )
    for group, group_shapes in zip(groups, shapes, strict=True):
        for key, shape in zip(group, group_shapes, strict=True):
            if key not in kept:
                continue
            if not kept[key].issuperset(_NEEDED):
                raise InvalidArgument(
                    f"{path} has the state of another optimizer than Adam: "
                    f"{', '.join(map(str, sorted(kept[key])))}"
                )
            other = tuple(states[key][_NEEDED[1]].shape)
            if other != shape:
                raise InvalidArgument(
                    f"{path} has moments of shape {list(other)} where the model has a parameter of "
                    f"{list(shape)}: it is of another model"
                )
