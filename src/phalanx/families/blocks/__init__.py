"""What families are made of that consist of an embedding, equal blocks and a head: the short way to an own model."""
