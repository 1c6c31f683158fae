def norm(layers, x):
    return x
