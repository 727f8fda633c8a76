use perpetua::*;
use std::time::Instant;
fn main() {
    let dir = std::env::args().nth(1).unwrap();
    let dev = match std::env::args().nth(2).as_deref() { Some("reference") => Device::Reference, _ => Device::Cpu };
    let model = Model::load(&dir).unwrap();
    let t = Instant::now();
    let mut e = Engine::new(&model, &EngineConfig { device: dev, ..Default::default() }).unwrap();
    eprintln!("engine {:?} compile {:?}", t.elapsed(), e.resident().compile_time());
    for p in &e.resident().compiled().programs { eprintln!("{} tasks {} events {} arena {:?}/{} stages {:?}", p.name, p.tasks.tasks.len(), p.tasks.events.len(), p.arena.peak_bytes, p.arena.without_reuse_bytes, p.stages); }
    let prompt = model.encode("The licence gives every user the freedom to").unwrap();
    let t = Instant::now();
    let mut ids = vec![];
    for tok in e.generate(&prompt, &GenerateOptions { max_new_tokens: 24, ..Default::default() }).unwrap() { let tok = tok.unwrap(); ids.push(tok.id); print!("{}", tok.text); }
    println!("\n{ids:?} {:?}", t.elapsed());
}
