"""Rotary positions against multiplication by complex units."""

import torch

from flexdilated.nn._positions import rotary_table, rotate


def test_rotary_angles_are_exact_a_million_tokens_in():
    positions = torch.tensor([0, 1, 999_999])
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64)
    angles = positions[:, None] * 100.0 ** -(torch.arange(4).double() / 4)
    units = torch.polar(torch.ones_like(angles), angles)
    turned = torch.complex(x[..., :4], x[..., 4:]) * units[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    for dtype, table_dtype, error in (
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.float32, 1e-2),
    ):
        table = rotary_table(positions, head_dim=8, base=100.0, dtype=dtype)
        got = rotate(x.to(dtype), table)
        assert (got.dtype, table[0].dtype) == (dtype, table_dtype)
        assert (got - expected).norm() <= error * expected.norm()
