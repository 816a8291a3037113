//! `makaira cache`: the compiled kernels on disk.

use makaira::jit::Store;
use serde_json::json;

use crate::output::{Format, bytes, count};

/// Arguments of `cache`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// List the entries.
    List(Format),
    /// Remove all entries; files of others in the folder stay.
    Clear(Format),
}

/// Runs `cache`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let store = Store::from_env();
    match args.action {
        Action::List(format) => list(&store, format),
        Action::Clear(format) => clear(&store, format),
    }
}

fn folder(store: &Store) -> String {
    match store.folder() {
        Some(folder) => folder.display().to_string(),
        None => "no store (MAKAIRA_NO_CACHE is set, or no folder is known)".to_owned(),
    }
}

fn list(store: &Store, format: Format) -> anyhow::Result<()> {
    let entries = store.list()?;
    let total: u64 = entries.iter().map(|entry| entry.size_bytes).sum();
    for entry in &entries {
        let hours = entry.age.as_secs() / 3600;
        let size = bytes(entry.size_bytes);
        format.line(format!("{}  {size:>9}  {hours:>5} h  {}", &entry.key[..12], entry.name))?;
    }
    let what = count(entries.len(), "kernel");
    format.line(format!("{}: {what}, {}", folder(store), bytes(total)))?;
    format.value(|| {
        let entries = entries.iter().map(|entry| {
            json!({
                "name": entry.name,
                "key": entry.key,
                "path": entry.path,
                "size_bytes": entry.size_bytes,
                "age_s": entry.age.as_secs(),
            })
        });
        json!({ "folder": store.folder(), "entries": entries.collect::<Vec<_>>() })
    })
}

fn clear(store: &Store, format: Format) -> anyhow::Result<()> {
    let cleared = store.clear()?;
    let what = count(cleared.num_entries, "kernel");
    format.line(format!("{}: {what}, {} removed", folder(store), bytes(cleared.size_bytes)))?;
    format.value(|| {
        json!({
            "folder": store.folder(),
            "num_entries": cleared.num_entries,
            "size_bytes": cleared.size_bytes,
        })
    })
}
