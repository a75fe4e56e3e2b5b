"""Adapters for training frameworks, one module each. Each needs its framework; nothing else imports them."""
