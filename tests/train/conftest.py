import pytest
import torch
from toy import plugins


@pytest.fixture(autouse=True)
def toy_plugins():
    torch.set_num_threads(1)
    with plugins():
        yield
