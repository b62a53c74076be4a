import gguf
import numpy as np
import pytest
from tiny_models import random_blocks

from engine.gguf_file import open_gguf
from engine.quant import IQ4_VALUES, TensorType, block_shape, dequantize, row_bytes, unpack

FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)
BLOCKS = tuple(type for type in TensorType if type not in FLOATS)

# type: (smallest q, largest q, runs in a block, smallest scale, largest scale, largest min)
RANGES = {
    TensorType.Q4_0: (-8, 7, 1, 1, 1, None),
    TensorType.Q4_1: (0, 15, 1, 1, 1, None),
    TensorType.Q5_0: (-16, 15, 1, 1, 1, None),
    TensorType.Q5_1: (0, 31, 1, 1, 1, None),
    TensorType.Q8_0: (-128, 127, 1, 1, 1, None),
    TensorType.Q2_K: (0, 3, 16, 0, 15, 15),
    TensorType.Q3_K: (-4, 3, 16, -32, 31, None),
    TensorType.Q4_K: (0, 15, 8, 0, 63, 63),
    TensorType.Q5_K: (0, 31, 8, 0, 63, 63),
    TensorType.Q6_K: (-32, 31, 16, -128, 127, None),
    TensorType.IQ4_NL: (-127, 113, 1, 1, 1, None),
    TensorType.MXFP4: (-12, 12, 1, 1, 1, None),
    TensorType.IQ4_XS: (-127, 113, 8, -32, 31, None),
}


def any_bytes(type: TensorType, *shape: int) -> np.ndarray:
    """Blocks of any bits at all, NaN and infinite scales among them."""
    return np.random.default_rng(int(type)).integers(0, 256, (*shape[:-1], row_bytes(type, shape[-1])), dtype=np.uint8)


def reference(type: TensorType, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(int(type))).astype(np.float32)


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    equal = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    assert equal.all(), f"{np.count_nonzero(~equal)} of {equal.size} differ"


def test_types_have_the_numbers_names_and_block_sizes_of_ggml() -> None:
    for type in TensorType:
        known = gguf.GGMLQuantizationType(int(type))
        assert known.name == type.name
        assert gguf.GGML_QUANT_SIZES[known] == block_shape(type)


@pytest.mark.parametrize("type", TensorType, ids=lambda type: type.name)
def test_dequantize_gives_the_bits_of_the_gguf_package(type: TensorType) -> None:
    raw = any_bytes(type, 17, 3 * 256)
    assert_same_bits(dequantize(type, raw), reference(type, raw))


@pytest.mark.parametrize("type", TensorType, ids=lambda type: type.name)
def test_dequantize_takes_any_leading_shape_and_rows_that_do_not_touch(type: TensorType) -> None:
    raw = any_bytes(type, 6, 5, 256)
    expected = dequantize(type, raw)
    assert expected.shape == (6, 5, 256)
    assert_same_bits(dequantize(type, raw[::2, 1:4]), expected[::2, 1:4])
    assert_same_bits(dequantize(type, raw[4, 3]), expected[4, 3])
    assert dequantize(type, raw[:0]).shape == (0, 5, 256)


@pytest.mark.parametrize("type", BLOCKS, ids=lambda type: type.name)
def test_unpacked_parts_have_the_ranges_of_their_format(type: TensorType) -> None:
    span, _ = block_shape(type)
    parts = unpack(type, any_bytes(type, 64, 4 * span))
    q_low, q_high, runs, scale_low, scale_high, min_high = RANGES[type]
    assert parts.q.shape == (64, 4, span)
    assert (parts.q.min(), parts.q.max()) == (q_low, q_high)
    assert parts.scales.shape == (64, 4, runs)
    assert (parts.scales.min(), parts.scales.max()) == (scale_low, scale_high)
    assert parts.d.shape == (64, 4)
    if min_high is None:
        assert parts.mins is None
    else:
        assert parts.mins is not None
        assert parts.mins.shape == parts.scales.shape
        assert (parts.mins.min(), parts.mins.max()) == (0, min_high)
    assert (parts.m is not None) == (type in (TensorType.Q4_1, TensorType.Q5_1) or min_high is not None)


@pytest.mark.parametrize("type", BLOCKS, ids=lambda type: type.name)
def test_a_weight_is_the_exact_value_of_its_parts_rounded_once(type: TensorType) -> None:
    raw = random_blocks(type, (64, 2 * block_shape(type)[0]), np.random.default_rng(5))
    parts = unpack(type, raw)
    run = parts.q.shape[-1] // parts.scales.shape[-1]
    # float64 holds every product and sum here without rounding.
    exact = parts.d[..., None].astype(np.float64) * parts.scales.repeat(run, -1) * parts.q
    if parts.mins is not None:
        exact -= parts.m[..., None].astype(np.float64) * parts.mins.repeat(run, -1)
    elif parts.m is not None:
        exact += parts.m[..., None].astype(np.float64)
    assert_same_bits(dequantize(type, raw), exact.astype(np.float32).reshape(64, -1))


def test_a_q4_k_block_written_by_hand_unpacks_to_what_was_written() -> None:
    scales, mins = np.array([1, 2, 3, 63, 17, 33, 48, 62]), np.array([63, 0, 5, 6, 16, 32, 47, 1])
    q = (np.arange(256) * 7) % 16
    first = np.concatenate([scales[:4] | (scales[4:] >> 4) << 6, mins[:4] | (mins[4:] >> 4) << 6])
    rest = (scales[4:] & 15) | (mins[4:] & 15) << 4
    runs = q.reshape(4, 2, 32)
    halves = np.array([0.5, -0.25], np.float16).view(np.uint8)
    raw = np.concatenate([halves, first, rest, (runs[:, 0] | runs[:, 1] << 4).ravel()]).astype(np.uint8)
    parts = unpack(TensorType.Q4_K, raw)
    assert parts.q.tolist() == [q.tolist()]
    assert parts.scales.tolist() == [scales.tolist()]
    assert parts.mins is not None
    assert parts.mins.tolist() == [mins.tolist()]
    assert parts.d.tolist() == [0.5]
    assert parts.m is not None
    assert parts.m.tolist() == [-0.25]


def test_iq4_codes_stand_for_the_values_of_ggml() -> None:
    packed = np.frombuffer(np.float16(1.0).tobytes() + bytes(range(16)), np.uint8)
    assert (
        dequantize(TensorType.IQ4_NL, packed).tolist() == [float(v) for v in IQ4_VALUES] + [float(IQ4_VALUES[0])] * 16
    )
    assert gguf.quants.IQ4_NL.kvalues == IQ4_VALUES


@pytest.mark.parametrize(
    "name",
    [
        "smollm2-135m",
        pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.slow),
        pytest.param("qwen2.5-coder-1.5b", marks=pytest.mark.slow),
        pytest.param("gemma-3-270m", marks=pytest.mark.slow),
    ],
)
def test_weights_of_real_models_have_the_bits_of_the_gguf_package(name: str, model_path) -> None:
    with open_gguf(model_path(name)) as model:
        for info in model.tensors.values():
            rows = model.data(info.name).reshape(-1, row_bytes(info.type, info.shape[-1]))
            some = rows[:: max(1, len(rows) // 8)]
            assert_same_bits(dequantize(info.type, some), reference(info.type, some))
