"""The network, readable top to bottom; start at flash.py."""
