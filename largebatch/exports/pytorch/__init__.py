"""The networks in PyTorch, as text for model cards: layers, a norm, the network. Nothing imports them."""
