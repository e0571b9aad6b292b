"""The vision tower: pixels of one picture -> embeddings of its positions.

Owns the weights of the tower and the aligner, and the learned vectors for start, newline and end of a picture.  Pictures are
encoded one at a time.  So the embeddings of a picture depend on no other picture, and they can be cached and shared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.model.parameters import Parameters
from deepinfer.ops import vision
from deepinfer.ops.arithmetic import rms_norm


class VisionTower:
    """Encodes pictures.

    Invariant: weights never change after construction; the embeddings of a picture depend only on its pixels.

    Attributes:
        config: ``vision`` section of the configuration.
        device, dtype: device and dtype of weights and results.
        taken: names of the checkpoint's tensors that the tower uses.
    """

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], *, device: torch.device | None = None, exact: bool = False
    ) -> None:
        """Take the tower's weights from the tensors of a checkpoint.

        Args:
            config: configuration with a ``vision`` section.
            tensors: checkpoint name -> tensor as stored; the reader has checked them.  Tensors of other parts are not used.
            device: where to compute; None for the device of the tensors.
            exact: compute in fp64 without rounding instead of bf16 with fp32 sums.

        Source: the published checkpoint's tensor inventory, for the names.
        """
        assert config.vision is not None, "a tower is built only for a configuration with a vision section"
        self.config = config.vision
        self.device = tensors["vision.norm.weight"].device if device is None else device
        parameters = Parameters(tensors=tensors, device=self.device, exact=exact)
        self.dtype = parameters.dtype

        def affine(prefix: str) -> tuple[Tensor, Tensor]:
            return parameters.activation(f"{prefix}.weight"), parameters.activation(f"{prefix}.bias")

        def block(prefix: str) -> vision.VisionBlock:
            wqkv, wqkv_bias = affine(f"{prefix}.attn.wqkv")
            wo, wo_bias = affine(f"{prefix}.attn.wo")
            return vision.VisionBlock(
                norm1=parameters.wide(f"{prefix}.norm1.weight"),
                wqkv=wqkv,
                wqkv_bias=wqkv_bias,
                wo=wo,
                wo_bias=wo_bias,
                norm2=parameters.wide(f"{prefix}.norm2.weight"),
                w1=parameters.activation(f"{prefix}.mlp.w1.weight"),
                w2=parameters.activation(f"{prefix}.mlp.w2.weight"),
            )

        self.patch = affine("vision.patch_embed.proj")
        self.blocks = [block(f"vision.blocks.{number}") for number in range(self.config.num_hidden_layers)]
        self.norm = parameters.wide("vision.norm.weight")
        self.aligner = (*affine("aligner.w1"), *affine("aligner.w2"))
        self.start, self.newline, self.end = (
            parameters.activation(name) for name in ("image_start", "image_newline", "image_end")
        )
        self.taken = parameters.taken

    def encode(self, pixels: Tensor) -> Tensor:
        """Embeddings of the IMAGE positions of one picture.

        Args:
            pixels: [3, height, width] float in [-1, 1]; sides are multiples of ``patch_size`` (images.prepare_pixels).

        Returns:
            [tokens_h x tokens_w, hidden_size of the text model] in the activations' dtype, in reading order.
        """
        side, ratio = self.config.patch_size, self.config.downsample_ratio
        _, height, width = pixels.shape
        assert height % side == width % side == 0, f"picture of {width} x {height} is not made of {side} px patches"
        grid_h, grid_w = height // side, width // side
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        cos, sin = vision.rope_table(grid_h, grid_w, head_dim, self.config.rope_theta, self.device)
        x = vision.patch_embed(vision.patchify(pixels.to(self.device, self.dtype), side), *self.patch)
        for block in self.blocks:
            x = x + vision.vision_attention(x, block, cos, sin)
            x = x + vision.vision_mlp(x, block)
        joined = vision.cells(rms_norm(x, self.norm, vision.NORM_EPS), grid_h, grid_w, ratio)
        return vision.aligner(joined, *self.aligner)

    def span(self, pixels: Tensor, tokens_w: int) -> Tensor:
        """Embeddings of all positions of one picture's span, in the order of ``images.span_roles``.

        Args:
            pixels: as for :meth:`encode`.
            tokens_w: IMAGE positions in a line, from the picture's plan.

        Returns:
            [tokens_h x (tokens_w + 1) + 2, hidden_size]: start, lines that end in a newline, end.

        Source: model report, vision section; ``image_start``, ``image_newline``, ``image_end`` of the published checkpoint.
        """
        embeddings = self.encode(pixels)
        grid = embeddings.view(embeddings.shape[0] // tokens_w, tokens_w, -1)
        lines = torch.cat([grid, self.newline.expand(grid.shape[0], 1, -1)], dim=1).flatten(0, 1)
        return torch.cat([self.start[None], lines, self.end[None]])
