"""How ranks talk: messages, transport, placement."""
