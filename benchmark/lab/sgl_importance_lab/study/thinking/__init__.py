"""Do recency, stable heads and attention scores say which pages a long thought will want?"""
