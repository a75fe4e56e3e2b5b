"""The demo's model: it looks back only, prefers what is near, and starts without an opinion."""

import math

import torch

from demos.torch_fsdp.model import ByteModel, distance_bias, loss_of

LENGTH = 32


def build() -> ByteModel:
    torch.manual_seed(0)
    return ByteModel(64, 2, LENGTH)


def test_the_first_loss_is_near_that_of_a_guess():
    codes = torch.randint(256, (16, LENGTH + 1))
    loss = loss_of(build()(codes[:, :-1]), codes[:, 1:])
    assert loss.dtype == torch.float32
    assert abs(loss.item() - math.log(256)) < 0.1


def test_what_is_to_come_changes_nothing_before_it():
    model, codes = build(), torch.randint(256, (2, LENGTH))
    changed = codes.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    before, after = model(codes), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_attention_is_that_of_torch():
    block = build().blocks[0]
    qkv = torch.randn(2, LENGTH, 3 * 64)
    bias = distance_bias(2, LENGTH)
    q, k, v = qkv.view(2, LENGTH, 3, 2, 32).permute(2, 0, 3, 1, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    result = block.attend(qkv, bias.repeat(2, 1, 1))
    # the sums are taken in another order
    torch.testing.assert_close(result, expected.transpose(1, 2).reshape(2, LENGTH, 64), rtol=1e-5, atol=1e-5)


def test_bf16_holds_the_bias_exactly():
    bias = distance_bias(8, 256)
    assert torch.equal(bias.bfloat16().float(), bias)
    assert bias[0, 5].tolist()[:7] == [-2.5, -2.0, -1.5, -1.0, -0.5, 0.0, -math.inf]


def test_blocks_hold_linear_weights_alone():
    names = {name.partition(".")[2] for name, _ in build().blocks.named_parameters()}
    assert names == {"qkv.weight", "out.weight", "up.weight", "down.weight"}
