"""The Transformer, its families and its weights. Knows no batch policy."""
