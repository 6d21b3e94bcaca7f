"""The message-passing backbones, block by block, and the sums of messages that they share."""
