"""The paged KV cache of one layer on a GPU: its layout, and the writing of new keys and values.

keys, values    [num_blocks, num_kv_heads, block_size, head_dim] each

so that a head's part of a block is contiguous. Elements are those of the activations, or bytes
with one float32 scale a KV head for keys and for values: x is stored as x / scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rawpaged.errors import BackendError
from rawpaged.gpu.arrays import ArrayInfo, array_info, check, has_contiguous_axes
from rawpaged.gpu.module import Instance, KernelDeclaration, Loader, instantiate, load_kernels

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class ElementType:
    """A type of elements: its name in C, in names of kernels, and the dtype of arrays of it."""

    c_type: str
    label: str
    array_dtype: str
    itemsize: int

    @property
    def is_scaled(self) -> bool:
        return self.itemsize == 1


ELEMENT_TYPES = {
    "bfloat16": ElementType("bf16", "bf16", "bfloat16", 2),
    "float16": ElementType("half", "f16", "float16", 2),
    "fp8_e4m3": ElementType("e4m3", "fp8", "uint8", 1),
    "int8": ElementType("int8", "int8", "int8", 1),
}
"""Types of a cache by name; the first two are those of activations too."""

_STORE = KernelDeclaration(
    "store_kv.cu",
    "store_kv",
    "C* cache_keys, C* cache_values, const T* keys, const T* values, const long long* slots, "
    "const float* key_scale, const float* value_scale, int num_tokens, int num_kv_heads, "
    "int block_shift, long long key_stride, long long value_stride",
)
_THREADS = 256
_MOST_ELEMENTS = 2**31 - 1
"""Groups of 8 elements that one launch writes at most."""


def check_cache_shape(head_dim: int, block_size: int) -> None:
    """Raise BackendError unless the kernels take heads and blocks of these sizes."""
    if head_dim not in HEAD_DIMS:
        raise BackendError(f"{head_dim=} is not one of {HEAD_DIMS}, which the GPU kernels take")
    if block_size not in BLOCK_SIZES:
        raise BackendError(f"{block_size=} is not one of {BLOCK_SIZES}, which the GPU kernels take")


def cache_shape(
    num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int
) -> tuple[int, int, int, int]:
    """Shape of a layer's keys, and of its values."""
    return num_blocks, num_kv_heads, block_size, head_dim


def bytes_per_block(num_kv_heads: int, head_dim: int, block_size: int, cache_dtype: str) -> int:
    """Bytes of the keys and values of one block in one layer."""
    return 2 * num_kv_heads * block_size * head_dim * ELEMENT_TYPES[cache_dtype].itemsize


def type_label(dtype: str, cache_dtype: str) -> tuple[str, str]:
    """(type, suffix) in names of kernels: ("bf16", "_fp8"), and no suffix for equal types."""
    suffix = "" if cache_dtype == dtype else f"_{ELEMENT_TYPES[cache_dtype].label}"
    return ELEMENT_TYPES[dtype].label, suffix


def check_types(dtype: str, cache_dtype: str) -> None:
    """Raise BackendError unless activations of `dtype` can go with a cache of `cache_dtype`."""
    if dtype not in ("bfloat16", "float16"):
        raise BackendError(f"{dtype=} is not bfloat16 or float16, which the GPU kernels take")
    if cache_dtype not in (dtype, "fp8_e4m3", "int8"):
        raise BackendError(f"{cache_dtype=} is not {dtype}, fp8_e4m3 or int8")


def is_cache(info: ArrayInfo, num_kv_heads: int, block_size: int, head_dim: int) -> bool:
    """Whether an array is a layer's keys or values of this shape, as the kernels read them."""
    return (
        len(info.shape) == 4
        and info.shape[1:] == (num_kv_heads, block_size, head_dim)
        and info.is_contiguous
        and info.pointer % 16 == 0
    )


def is_heads(info: ArrayInfo, num_heads: int, head_dim: int, dtype: str) -> bool:
    """Whether an array is [num_tokens, num_heads, head_dim] in rows of whole 16 bytes."""
    return (
        info.dtype == dtype
        and info.shape[1:] == (num_heads, head_dim)
        and has_contiguous_axes(info, 2)
        and info.pointer % 16 == 0
        and (info.shape[0] <= 1 or info.strides[0] * info.itemsize % 16 == 0)
    )


def checked_scales(
    cache_type: ElementType, num_kv_heads: int, key_scale: Any, value_scale: Any
) -> tuple[Any, Any] | None:
    """Both scales f32[num_kv_heads] of a cache of bytes, None for another.

    Raises ValueError when they are missing, of another shape or type, or not wanted.
    """
    if not cache_type.is_scaled:
        if key_scale is not None or value_scale is not None:
            raise ValueError(f"a cache of {cache_type.array_dtype} has no scales")
        return None
    if key_scale is None or value_scale is None:
        raise ValueError(f"a cache of {cache_type.label} needs key_scale and value_scale")
    check(
        all(is_vector(scale, num_kv_heads) for scale in (key_scale, value_scale)),
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return key_scale, value_scale


def is_vector(array: Any, size: int) -> bool:
    """Whether an array is f32[size], without gaps."""
    info = array_info(array)
    return info.dtype == "float32" and info.shape == (size,) and info.is_contiguous


def store_instance(dtype: str, cache_dtype: str, head_dim: int) -> Instance:
    """The kernel that writes heads of `dtype` to a cache of `cache_dtype`."""
    c_type, cache_type = ELEMENT_TYPES[dtype].c_type, ELEMENT_TYPES[cache_dtype].c_type
    label, suffix = type_label(dtype, cache_dtype)
    return instantiate(
        _STORE,
        f"store_kv_{label}_h{head_dim}{suffix}",
        (c_type, cache_type, head_dim),
        types={"T": c_type, "C": cache_type},
        threads=_THREADS,
    )


class StoreKV:
    """Writes keys and values of one type and head size to a cache of one type.

    dtype is "bfloat16" or "float16"; cache_dtype is the same, "fp8_e4m3" (arrays of uint8) or
    "int8". Raises BackendError for what the kernels do not take.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        dtype: str,
        cache_dtype: str,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
    ) -> None:
        check_types(dtype, cache_dtype)
        check_cache_shape(head_dim, block_size)
        self.dtype = dtype
        self.cache_type = ELEMENT_TYPES[cache_dtype]
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        instance = store_instance(dtype, cache_dtype, head_dim)
        self._kernel = load_kernels(loader, [instance])[instance.name]

    def __call__(
        self,
        cache_keys: Any,
        cache_values: Any,
        keys: Any,
        values: Any,
        slot_mapping: Any,
        *,
        key_scale: Any = None,
        value_scale: Any = None,
    ) -> None:
        """Write views T[num_tokens, num_kv_heads, head_dim] to the slots i64[num_tokens].

        A negative slot leaves its token out. Scales f32[num_kv_heads] go with caches of bytes
        and only with them: what is stored is x / scale, rounded to nearest even and clamped to
        the finite range of the type, for int8 [-127, 127].
        """
        k, v, slots = array_info(keys), array_info(values), array_info(slot_mapping)
        shape = (self.num_kv_heads, self.head_dim)
        check(
            all(self._is_cache(cache) for cache in (cache_keys, cache_values))
            and all(is_heads(info, *shape, self.dtype) for info in (k, v))
            and k.shape == v.shape
            and slots.dtype == "int64"
            and slots.shape == k.shape[:1]
            and slots.is_contiguous,
            cache_keys=cache_keys,
            cache_values=cache_values,
            keys=keys,
            values=values,
            slot_mapping=slot_mapping,
        )
        scales = checked_scales(self.cache_type, self.num_kv_heads, key_scale, value_scale)
        num_tokens = k.shape[0]
        if num_tokens == 0:
            return
        groups = num_tokens * self.num_kv_heads * self.head_dim // 8
        assert groups <= _MOST_ELEMENTS, f"{num_tokens=}"
        self._kernel(
            (-(-groups // _THREADS),),
            (_THREADS,),
            cache_keys,
            cache_values,
            keys,
            values,
            slot_mapping,
            *(scales or (keys, keys)),  # not read in a cache that has none
            num_tokens,
            self.num_kv_heads,
            self.block_size.bit_length() - 1,
            k.strides[0],
            v.strides[0],
        )

    def _is_cache(self, cache: Any) -> bool:
        info = array_info(cache)
        return info.dtype == self.cache_type.array_dtype and is_cache(
            info, self.num_kv_heads, self.block_size, self.head_dim
        )
