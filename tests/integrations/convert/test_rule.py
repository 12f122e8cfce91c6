"""The rule of a call: what is padding, and what is not."""

import pytest
import torch
from torch.nn import functional as F

import flexdilated as fd
from flexdilated import masks
from flexdilated.integrations.convert._rule import Given, call_rule


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_mask_of_keys_is_padding(num_queries: int, rows: int) -> None:
    """For one query, too, whose mask might be read as a row of pairs."""
    q, (k, v) = torch.randn(3, 2, num_queries, 8), torch.randn(2, 3, 2, 5, 8)
    mask = (torch.arange(5) < torch.tensor([5, 3, 1])[:rows, None])[:, None, None]
    rule = call_rule(Given("it", masks.every(), by_name=True), mask, (3, num_queries, 5), is_causal=False)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(fd.attend(q, k, v, rule), wanted, rtol=1e-4, atol=1e-5)
