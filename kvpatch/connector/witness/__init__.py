"""An alarm on D alone: the prompt's last token, which D computes too, against what P sent."""
