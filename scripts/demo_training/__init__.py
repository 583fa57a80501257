"""Parts of scripts/train_demo_model.py: the model, its optimizer, the data feed, evaluation and export."""
