"""Arrays without reference counts, for loops that slice their scratch.

Numba counts references to what `np.empty` returns at every slice and call: atomic operations, which
were a tenth of attention's time. Nothing is counted for what belongs to others.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_cgutils: Any = cgutils


@intrinsic
def borrow(typingctx: Any, arrays: Any) -> Any:
    """A tuple of arrays, to be used before `keep(arrays)` only."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        views = []
        for index, type_ in enumerate(arrays):
            owner = builder.extract_value(args[0], index)
            view = context.make_array(type_)(context, builder, owner)
            view.meminfo = _cgutils.get_null_value(view.meminfo.type)
            views.append(view._getvalue())
        return context.make_tuple(builder, arrays, views)

    return arrays(arrays), generate


@intrinsic
def keep(typingctx: Any, arrays: Any) -> Any:
    """Until here the arrays are not given back."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return types.void(arrays), generate
