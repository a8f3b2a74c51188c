"""What clients and peers may send."""
