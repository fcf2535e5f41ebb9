"""Heads on two processes are those of one: ``torchrun --nproc_per_node 2 SCRIPT``."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from hf_xai.torch_geometric import AllInEncoder, AllInTransferHead
from tests.distributed.leaving import leave
from tests.torch_geometric.all_in.communities import communities, wide_and_narrow


def main() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    torch.manual_seed(0)
    encoder = AllInEncoder(hidden_channels=16, projection_dim=16)
    for task, data, mask in (("node", communities(), torch.arange(15)), ("graph", wide_and_narrow(), None)):
        alone = AllInTransferHead(encoder, task=task, num_projections=2).fit(data, mask, batch_size=5)
        shared = AllInTransferHead(encoder, task=task, num_projections=2)
        shared.fit(data, mask, batch_size=5, accelerator=accelerator)
        assert torch.equal(shared.weight, alone.weight)
        shares = shared.predict_proba(data, batch_size=5, accelerator=accelerator)
        assert torch.equal(shares, alone.predict_proba(data, batch_size=5))
    print("all checks passed")
    leave()


if __name__ == "__main__":
    main()
