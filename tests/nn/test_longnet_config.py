"""LongNetConfig: what it holds and what it refuses."""

from dataclasses import asdict, replace

import pytest

import flexdilated as fd
from flexdilated.nn import LongNetConfig

TINY = LongNetConfig(
    vocab_size=19,
    embed_dim=24,
    depth=2,
    num_heads=4,
    segment_lengths=(4, 16, 64),
    dilation_rates=(1, 2, 6),
)


def test_config_holds_tuples_and_hashes():
    config = replace(TINY, segment_lengths=[4, 8], dilation_rates=[1, 2])
    assert config.segment_lengths == (4, 8)
    assert hash(config) == hash(replace(TINY, segment_lengths=(4, 8), dilation_rates=(1, 2)))
    assert (config.hidden_dim, config.kv_heads, config.head_dim) == (96, 4, 6)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_heads": 5}, ValueError, "multiple of num_heads; got embed_dim=24 and num_heads=5"),
        ({"num_heads": 8}, ValueError, "must be even, .* got 24 / 8 = 3"),
        ({"num_kv_heads": 3}, ValueError, "multiple of num_kv_heads; got num_heads=4 and num_kv_heads=3"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be at least 1"),
        ({"depth": 0}, ValueError, "depth must be at least 1"),
        ({"depth": 2.0}, TypeError, "depth must be an integer"),
        ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1"),
        ({"ffn_dim": 0}, ValueError, "ffn_dim must be at least 1"),
        ({"rotary_base": 1.0}, ValueError, "rotary_base must be above 1; got rotary_base=1.0"),
        ({"rotary_base": float("nan")}, ValueError, "rotary_base must be finite"),
        ({"position": "alibi"}, ValueError, "'rotary', 'xpos', 'learned'; got position='alibi'"),
        (
            {"position": "learned"},
            ValueError,
            "needs it; got position='learned', max_positions=None",
        ),
        ({"max_positions": 9}, ValueError, "position='learned' needs it; got position='rotary', max_positions=9"),
        ({"position": "xpos", "causal": False}, ValueError, "position='xpos' needs causal=True"),
        ({"xpos_scale": 0}, ValueError, "xpos_scale must be at least 1"),
        ({"norm": "batch"}, ValueError, "'layer', 'rms'; got norm='batch'"),
        ({"dropout": 1}, ValueError, "dropout must be at least 0 and below 1; got dropout=1"),
        ({"drop_path": -0.1}, ValueError, "drop_path must be at least 0"),
        ({"bias": None}, TypeError, "bias must be True or False"),
        ({"subln": True, "deepnorm": True}, ValueError, "take one of them; got both"),
        ({"layout": "random"}, ValueError, "'auto', 'natural', 'residue'; got layout='random'"),
        ({"engine": "dense"}, ValueError, "got engine='dense'"),
        ({"checkpoint": 1}, TypeError, "checkpoint must be True or False"),
        ({"causal": None}, TypeError, "causal must be True or False"),
        ({"vocab_size": None, "tie_embeddings": True}, ValueError, "tie_embeddings needs a token embedding"),
        ({"segment_lengths": (4,)}, ValueError, "one entry each a branch"),
        ({"segment_lengths": 4}, TypeError, "segment_lengths must be a sequence"),
        ({"dilation_rates": (1, 2, 0)}, ValueError, "at least 1"),
        ({"heads": "grouped", "num_heads": 2}, ValueError, "3 head groups need a head each"),
    ],
)
def test_bad_configs(changes, error, message):
    with pytest.raises(error, match=message):
        replace(TINY, **changes)


def test_a_model_needs_a_config():
    with pytest.raises(TypeError, match="must be a LongNetConfig; got dict"):
        fd.LongNet(asdict(TINY))
