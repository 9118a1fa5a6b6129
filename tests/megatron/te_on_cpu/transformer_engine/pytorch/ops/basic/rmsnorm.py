"""TransformerEngine 2.16's RMSNorm operation, in fp32 by torch: the base class of the `RMSNorm` module."""

import torch

from ..op import BasicOperation


def rms_norm(x, weight, eps, zero_centered_gamma):
    weight = weight.float() + 1 if zero_centered_gamma else weight.float()
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


class RMSNorm(BasicOperation):
    def __init__(self, normalized_shape, *, eps=1e-5, device=None, dtype=None, zero_centered_gamma=False, sm_margin=0):
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype))
        self.reset_parameters()
        self._sm_margins = {"forward": sm_margin, "backward": sm_margin, "inference": sm_margin}

    def reset_parameters(self):
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def op_forward(self, input_):
        return rms_norm(input_, self.weight, self.eps, self.zero_centered_gamma)
