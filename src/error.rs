//! `Error`: one variant per room.
