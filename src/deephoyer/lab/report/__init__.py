"""Results that anyone can measure again: records, their verification, tables and figures made from them."""
