"""P's word that it still holds the blocks of a request, which D hears after its last byte."""
