//! A model folder: WHICH network, its numbers, its words.
//!
//! In comes a folder laid out as model repositories are (config.json, model.safetensors or shards, tokenizer.json,
//! generation_config.json, chat_template.jinja; modules.json for sentence embeddings); out goes [`ModelFolder`].
//! Nothing here knows how a network is computed.
//!
//! Laws:
//! - Whatever a folder holds, it is read or refused with one line that names file, key, value and expectation; never a
//!   panic. What would change the result and is not done is refused, never ignored.
//! - Opening is cheap: tokenizer, chat template and weights are read when first asked for, once, and weights are
//!   mapped, not copied. (A head that is said to be the embedding table is compared with it, where the files have
//!   both.)

mod aligned;
mod declared;
mod embedding;
mod error;
mod factors;
mod fp8;
mod integers;
mod json;
mod python;
mod remade;

pub mod bert;
pub mod chat;
pub mod config;
pub mod decoder;
pub mod gemma3;
pub mod gemma4;
pub mod generation;
pub mod layout;
pub mod llama;
pub mod modern_bert;
pub mod olmo;
pub mod quantize;
pub mod reasoning;
pub mod sentence;
pub mod synth;
pub mod tokenizer;
#[allow(unsafe_code, reason = "the mapping of files")]
pub mod weights;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub use chat::{ChatMessage, ChatTemplate};
pub use config::{
    Activation, Architecture, BertConfig, DecoderConfig, Experts, ModelConfig, ModernBertConfig, QkNorm, Rope,
    RopeScaling, Stored,
};
pub use error::ModelError;
use factors::Factors;
pub use generation::GenerationConfig;
pub(crate) use generation::{PENALTIES, is_penalty};
pub use layout::{Role, TensorSpec};
pub use quantize::{Quantize, Quantized};
pub use reasoning::{ReasoningParser, TurnPart};
pub use sentence::{Dense, Pooling, SentenceConfig};
pub use synth::{SynthOptions, SynthSource, SynthSummary, synth};
pub use tokenizer::{DecodeStream, Tokenizer, check_token_ids};
pub use weights::{TensorView, Weights};

/// A model folder, opened.
#[derive(Debug)]
pub struct ModelFolder {
    dir: PathBuf,
    /// Where config, weights and tokenizer lie: `dir`, but for some sentence models.
    transformer_dir: PathBuf,
    config: ModelConfig,
    stored: Stored,
    generation: GenerationConfig,
    sentence: Option<SentenceConfig>,
    tokenizer: OnceLock<Tokenizer>,
    chat_template: OnceLock<ChatTemplate>,
    weights: OnceLock<Weights>,
    factors: OnceLock<Factors>,
}

impl ModelFolder {
    /// Reads a folder's configuration.
    pub fn open(dir: impl AsRef<Path>) -> Result<ModelFolder, ModelError> {
        let dir = dir.as_ref();
        let meta = std::fs::metadata(dir).map_err(|e| ModelError::read(dir, e))?;
        if !meta.is_dir() {
            return Err(ModelError::NotAFolder { path: dir.to_owned() });
        }
        // Without a modules.json it depends on the network whether it is a sentence model.
        let mut sentence = if SentenceConfig::is_there(dir) { Some(SentenceConfig::open(dir)?) } else { None };
        let transformer_dir = sentence.as_ref().map_or_else(|| dir.to_owned(), |s| s.transformer_dir.clone());

        let path = transformer_dir.join("config.json");
        let value = json::read_value(&path)?;
        let (config, stored) = (ModelConfig::from_value(&path, &value)?, Stored::of(&path, &value)?);
        match &sentence {
            Some(sentence) => check_sentence(&path, &config, sentence)?,
            None if config.architecture().is_encoder() => sentence = Some(SentenceConfig::open(dir)?),
            None => {}
        }
        let generation = GenerationConfig::open(&transformer_dir, &path, &value)?;
        let mut folder = ModelFolder {
            dir: dir.to_owned(),
            transformer_dir,
            config,
            stored,
            generation,
            sentence,
            tokenizer: OnceLock::new(),
            chat_template: OnceLock::new(),
            weights: OnceLock::new(),
            factors: OnceLock::new(),
        };
        // A sentence model's head, if there is one, is read by nobody: as if it were the embeddings.
        let is_tied = folder.sentence.is_some();
        let has_head = !is_tied && folder.has_head_of_its_own();
        if let ModelConfig::Decoder(config) = &mut folder.config {
            config.tie_word_embeddings = is_tied || config.tie_word_embeddings && !has_head;
            if is_tied {
                // Nobody sees logits.
                config.logits_divisor = 1.0;
            }
        }
        Ok(folder)
    }

    /// Whether the checkpoint has a head that is not the embeddings, which its configuration says it is: transformers
    /// goes by the file. What is wrong with the weights, whoever needs them hears.
    fn has_head_of_its_own(&self) -> bool {
        let ModelConfig::Decoder(DecoderConfig { tie_word_embeddings: true, .. }) = &self.config else { return false };
        let Ok(weights) = self.weights() else { return false };
        let [head, embeddings] = ["lm_head.weight", "model.embed_tokens.weight"].map(|name| weights.get(name));
        let (Some(head), Some(embeddings)) = (head, embeddings) else { return false };
        let is_other = (head.dtype, head.shape, head.bytes) != (embeddings.dtype, embeddings.shape, embeddings.bytes);
        [head, embeddings].iter().for_each(|tensor| weights.release(tensor.bytes));
        is_other
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Which network, and its sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The configuration of a text generation model; an error for a sentence model.
    pub fn decoder(&self) -> Result<&DecoderConfig, ModelError> {
        match (&self.config, &self.sentence) {
            (ModelConfig::Decoder(config), None) if !config.is_bidirectional => Ok(config),
            (ModelConfig::Decoder(_), None) => Err(ModelError::unsupported(
                &self.transformer_dir.join("config.json"),
                "is_causal or use_bidirectional_attention",
                "a model for text generation whose rows attend to those after them",
                "a causal one",
            )),
            (ModelConfig::Decoder(_), Some(_)) => Err(ModelError::unsupported(
                &self.dir.join("modules.json"),
                "modules",
                "a sentence model for text generation",
                "a model without them; this one makes embeddings (`perpetua embed`)",
            )),
            (ModelConfig::Bert(_) | ModelConfig::ModernBert(_), _) => Err(ModelError::unsupported(
                &self.transformer_dir.join("config.json"),
                "architectures",
                format!("{} for text generation", self.config.architecture()),
                Architecture::ALL
                    .into_iter()
                    .filter(|a| !a.is_encoder())
                    .map(Architecture::class_name)
                    .collect::<Vec<_>>()
                    .join(", "),
            )),
        }
    }

    /// What is done with a sentence model's vectors; an error for a text generation model.
    pub fn sentence_model(&self) -> Result<&SentenceConfig, ModelError> {
        self.sentence.as_ref().ok_or_else(|| {
            let encoders: Vec<_> =
                Architecture::ALL.into_iter().filter(|a| a.is_encoder()).map(Architecture::class_name).collect();
            ModelError::unsupported(
                &self.transformer_dir.join("config.json"),
                "architectures",
                format!("{} for sentence embeddings without a modules.json", self.config.architecture()),
                encoders.join(", "),
            )
        })
    }

    /// Whether it is a sentence model that wants a sentence in one pass, and not in as many as it takes.
    pub fn takes_whole(&self) -> bool {
        self.sentence.as_ref().is_some_and(|sentence| sentence.takes_whole(self.config.is_bidirectional()))
    }

    /// Where a generation ends.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// What is done with a sentence model's vectors; `None` for text generation.
    pub fn sentence(&self) -> Option<&SentenceConfig> {
        self.sentence.as_ref()
    }

    /// The tokenizer, read when first asked for. A sentence model's cuts at [`ModelFolder::max_tokens`].
    pub fn tokenizer(&self) -> Result<&Tokenizer, ModelError> {
        if let Some(tokenizer) = self.tokenizer.get() {
            return Ok(tokenizer);
        }
        let mut tokenizer = Tokenizer::open(&self.transformer_dir.join("tokenizer.json"))?;
        if let Some(sentence) = &self.sentence {
            tokenizer.truncate_to(self.max_tokens())?;
            if sentence.lower_case {
                tokenizer.lower_case()?;
            }
        }
        Ok(self.tokenizer.get_or_init(|| tokenizer))
    }

    /// The weights, mapped when first asked for.
    pub fn weights(&self) -> Result<&Weights, ModelError> {
        if let Some(weights) = self.weights.get() {
            return Ok(weights);
        }
        let mut weights = Weights::open(&self.transformer_dir)?;
        for dense in self.sentence.iter().flat_map(|sentence| &sentence.dense) {
            weights.add(&dense.folder, &dense.prefix)?;
        }
        for stack in layout::stacks(&self.config) {
            if stack.may_be_apart && !weights.contains(&stack.name) {
                continue;
            }
            weights.take_apart(&stack.name, &stack.shape, &stack.parts, &stack.part_shape)?;
        }
        let others_are_made_of = remade::files(&self.config).into_iter().map(|spec| (spec.name, spec.shape, false));
        let read = layout::tensors(&self.config).into_iter().map(|spec| {
            let stays = spec.role.is_matrix() && !self.config.architecture().is_encoder();
            (spec.name, spec.shape, stays)
        });
        // Those that others are made of last: one of these may have the name of what is made of it.
        weights.unpack(read.chain(others_are_made_of), self.stored)?;
        weights.remake(remade::of(&self.config))?;
        Ok(self.weights.get_or_init(|| weights))
    }

    /// The bytes of tensor `name` as the network reads them: as they are in the checkpoint, but for what is
    /// [made](Weights::make_all) of it, factors of norms that it has less one, which are in f32 and one more, and for
    /// those of a norm whose factors take part in dividing logits, in f32, too.
    pub fn tensor_bytes(&self, name: &str) -> Option<&[u8]> {
        let weights = self.weights().ok()?;
        let factors = self.factors.get_or_init(|| Factors::of(&self.config, weights));
        factors.get(name).or_else(|| Some(weights.get(name)?.bytes))
    }

    /// Names of the checkpoint's tensors that the network does not read, in order; see [`layout::is_spare`].
    ///
    /// ```no_run
    /// # use perpetua::model::{ModelFolder, layout};
    /// let folder = ModelFolder::open("path/to/Qwen3-0.6B")?;
    /// for name in folder.unused_tensors()?.into_iter().filter(|name| !layout::is_spare(folder.config(), name)) {
    ///     eprintln!("{name} is not used");
    /// }
    /// # Ok::<(), perpetua::model::ModelError>(())
    /// ```
    ///
    /// # Errors
    /// As [`ModelFolder::weights`].
    pub fn unused_tensors(&self) -> Result<Vec<&str>, ModelError> {
        let (weights, wanted) = (self.weights()?, self.wanted_tensors()?);
        let used: HashSet<&str> = wanted.iter().filter_map(|name| weights.name_in_file(name)).collect();
        Ok(weights.names().filter(|name| !used.contains(name)).collect())
    }

    /// Whether the checkpoint has not all tensors that the network reads, or cannot be read.
    pub fn lacks_tensors(&self) -> bool {
        let (Ok(weights), Ok(wanted)) = (self.weights(), self.wanted_tensors()) else { return true };
        !wanted.iter().all(|name| weights.contains(name))
    }

    /// Names of the tensors that the network reads, as this checkpoint has them.
    fn wanted_tensors(&self) -> Result<Vec<String>, ModelError> {
        let prefix = self.encoder_prefix()?;
        let of_network = layout::tensors(&self.config).into_iter().map(|spec| format!("{prefix}{}", spec.name));
        let dense = self.sentence.iter().flat_map(|sentence| &sentence.dense);
        Ok(of_network.chain(dense.flat_map(Dense::tensors).map(|(name, _)| name)).collect())
    }

    /// What stands before the names of an encoder's tensors: `bert.` or `roberta.` where the model was saved with a
    /// head on top.
    pub fn encoder_prefix(&self) -> Result<&'static str, ModelError> {
        if !self.config.architecture().is_encoder() {
            return Ok("");
        }
        let weights = self.weights()?;
        let is_before = |prefix: &&str| weights.contains(&format!("{prefix}embeddings.word_embeddings.weight"));
        Ok(layout::ENCODERS.into_iter().find(is_before).unwrap_or(""))
    }

    /// The longest input that gives what the model was trained to give: the configuration's context or a sentence
    /// model's `max_seq_length`, whichever is less.
    pub fn max_tokens(&self) -> usize {
        let mut max = self.config.max_position_embeddings();
        if let Some(sentence) = &self.sentence {
            max = max.min(sentence.max_seq_length.unwrap_or(max));
        }
        max
    }

    /// The chat template, read when first asked for.
    pub fn chat_template(&self) -> Result<&ChatTemplate, ModelError> {
        if let Some(template) = self.chat_template.get() {
            return Ok(template);
        }
        let template = ChatTemplate::open(&self.dir)?;
        Ok(self.chat_template.get_or_init(|| template))
    }

    /// Token ids of a prompt, each below the model's vocabulary.
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, ModelError> {
        self.checked(self.tokenizer()?.encode(prompt)?)
    }

    /// Token ids of a conversation up to the assistant's next turn.
    pub fn encode_chat(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, ModelError> {
        self.encode_chat_with(messages, &[])
    }

    /// The same with variables of the template's own, such as `enable_thinking` or `reasoning_effort`.
    pub fn encode_chat_with(
        &self,
        messages: &[ChatMessage],
        variables: &[(&str, serde_json::Value)],
    ) -> Result<Vec<u32>, ModelError> {
        let text = self.chat_template()?.render_with(messages, variables)?;
        self.checked(self.tokenizer()?.encode_rendered(&text)?)
    }

    /// What tells reasoning from the answer in the turn that follows `prompt`.
    pub fn reasoning_parser(&self, prompt: &[u32]) -> Result<ReasoningParser, ModelError> {
        ReasoningParser::new(self.tokenizer()?, prompt)
    }

    /// Token ids of a sentence to embed: prepared as the sentence model says, after its `prompt` of this name (`None`:
    /// its default one, if it has one), cut to its longest input.
    pub fn encode_sentence(&self, prompt: Option<&str>, text: &str) -> Result<Vec<u32>, ModelError> {
        Ok(self.encode_sentence_within(prompt, text, self.max_tokens())?.0)
    }

    /// As [`ModelFolder::encode_sentence`], cut to `max_tokens` where these are fewer; and whether it was cut.
    ///
    /// # Errors
    /// As [`ModelFolder::encode_sentence`]; no room for text beside special tokens.
    pub fn encode_sentence_within(
        &self,
        prompt: Option<&str>,
        text: &str,
        max_tokens: usize,
    ) -> Result<(Vec<u32>, bool), ModelError> {
        let text = self.sentence_model()?.prepare(prompt, text)?;
        let (ids, is_cut) = self.tokenizer()?.encode_within(&text, max_tokens.min(self.max_tokens()))?;
        Ok((self.checked(ids)?, is_cut))
    }

    fn checked(&self, ids: Vec<u32>) -> Result<Vec<u32>, ModelError> {
        check_token_ids(&ids, self.config.vocab_size())?;
        Ok(ids)
    }
}

/// Whether a sentence model's parts, of which the config.json is at `path`, agree.
fn check_sentence(path: &Path, config: &ModelConfig, sentence: &SentenceConfig) -> Result<(), ModelError> {
    let pooled = sentence.dim.map(|dim| (dim, "the pooling's word_embedding_dimension"));
    let pooled = pooled.or(sentence.dense.first().map(|dense| (dense.in_features, "Dense's in_features")));
    match pooled.filter(|(dim, _)| *dim != config.hidden_size()) {
        Some((dim, whose)) => {
            let given = config.hidden_size().to_string();
            Err(ModelError::key(path, "hidden_size", given, format!("{dim}, {whose}")))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
    }

    #[test]
    fn a_tied_head_counts_where_it_differs() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let options = SynthOptions { seed: 3, ..SynthOptions::default() };
        let out = dir.path().join("tied");
        synth(SynthSource::Preset("tiny-simt"), &out, &options, &mut |_, _| std::ops::ControlFlow::Continue(()))
            .expect("a preset");
        let mut config: serde_json::Value =
            serde_json::from_slice(&fs::read(out.join("config.json")).expect("written")).expect("JSON");
        config["tie_word_embeddings"] = true.into();
        fs::write(out.join("config.json"), config.to_string()).expect("written");
        let path = out.join("model.safetensors");
        let bytes = fs::read(&path).expect("written");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("sound");
        let mut tensors: Vec<_> = file.tensors();
        tensors.retain(|(name, _)| name != "lm_head.weight");
        let embeddings = file.tensor("model.embed_tokens.weight").expect("there");
        let bits = embeddings.data().iter().map(|byte| byte ^ 1).collect::<Vec<_>>();
        let other = safetensors::tensor::TensorView::new(embeddings.dtype(), embeddings.shape().to_vec(), &bits)
            .expect("as long");
        for (head, is_tied) in [(None, true), (Some(embeddings), true), (Some(other), false)] {
            let has_head = head.is_some();
            let all = tensors.iter().cloned().chain(head.map(|head| ("lm_head.weight".to_owned(), head)));
            fs::write(&path, safetensors::serialize(all, None).expect("sound")).expect("written");
            let folder = ModelFolder::open(&out).expect("sound");
            assert_eq!(folder.decoder().expect("of text").tie_word_embeddings, is_tied);
            assert!(!folder.lacks_tensors());
            let unused = folder.unused_tensors().expect("weights");
            assert_eq!(unused.is_empty(), !(has_head && is_tied), "{unused:?}");
            assert!(unused.iter().all(|name| layout::is_spare(folder.config(), name)));
        }
    }

    #[test]
    fn fixtures_open() {
        for name in [
            "tiny-qwen3",
            "tiny-llama",
            "tiny-qwen2",
            "tiny-gpt-oss",
            "tiny-gpt-oss-bf16",
            "tiny-glm4",
            "tiny-qwen3-fp8",
            "tiny-qwen3-awq",
            "tiny-llama-gptq",
            "tiny-qwen3-next",
            "tiny-lfm2-moe",
            "tiny-lfm3",
            "tiny-trinity",
            "tiny-gemma4",
            "tiny-gemma4-moe",
            "tiny-glm4-moe-lite",
            "tiny-deepseek-v2",
            "tiny-hunyuan",
        ] {
            let folder = ModelFolder::open(fixture(name)).expect(name);
            assert_eq!(folder.generation().eos_token_ids, [2]);
            assert_eq!(folder.max_tokens(), folder.config().max_position_embeddings());
            for spec in layout::tensors(folder.config()) {
                folder.weights().expect(name).expect(&spec.name, &spec.shape).expect(name);
            }
            assert_eq!(folder.unused_tensors().expect(name), [""; 0]);
            let ids = folder.encode_chat(&[ChatMessage::new("user", "Hi")]).expect(name);
            assert_eq!((ids[0], folder.decoder().is_ok(), folder.sentence_model().is_err()), (1, true, true));
        }
    }

    /// gpt-oss's experts, and matrices whose rows stand in another order: made when they are asked for or all at once,
    /// the same; and files that are not as the configuration says.
    #[test]
    fn tensors_are_made_of_what_files_have() {
        let remade = ["tiny-gpt-oss", "tiny-gpt-oss-bf16", "tiny-glm4", "tiny-qwen3-next"];
        for name in remade.into_iter().chain(["tiny-qwen3-fp8", "tiny-qwen3-awq", "tiny-llama-gptq"]) {
            let [lazy, at_once] = [(); 2].map(|()| ModelFolder::open(fixture(name)).expect(name));
            let [lazy, at_once] = [&lazy, &at_once].map(|folder| folder.weights().expect(name));
            let (unmade, mut made) = (at_once.unmade_bytes(), 0);
            at_once.make_all(&mut |bytes| made += bytes).expect(name);
            assert!(unmade > 0 && made == unmade && at_once.unmade_bytes() == 0, "{name}: {made} of {unmade} bytes");
            for tensor in lazy.names() {
                let [one, other] = [lazy, at_once].map(|weights| weights.get(tensor).expect(tensor));
                assert!((one.dtype, one.shape, one.bytes) == (other.dtype, other.shape, other.bytes), "{tensor}");
            }
            assert_eq!(lazy.unmade_bytes(), 0);
        }
        let dir = tempfile::tempdir().expect("a temporary folder");
        let said = |name: &str, change: serde_json::Value| {
            let mut config = json::read_value(&fixture(name).join("config.json")).expect("JSON");
            config.as_object_mut().expect("keys").extend(change.as_object().expect("keys").clone());
            fs::write(dir.path().join("config.json"), config.to_string()).expect("a file");
            let weights = fixture(name).join("model.safetensors");
            fs::copy(weights, dir.path().join("model.safetensors")).expect("a copy");
            ModelFolder::open(dir.path()).expect("a folder").weights().expect_err("refused").to_string()
        };
        let first = "model.layers.0.mlp.experts.gate_up_proj";
        let message = said("tiny-gpt-oss", json!({ "quantization_config": null }));
        assert!(message.contains(&format!("{first}: no such tensor")), "{message}");
        for n in [4, 7] {
            let message = said("tiny-gpt-oss", json!({ "num_local_experts": n }));
            assert_eq!(message, format!("{first}_blocks: shape [6, 192, 5, 16], expected [{n}, 192, 5, 16]"));
        }
        let message = said("tiny-gpt-oss-bf16", json!({ "intermediate_size": 60 }));
        assert_eq!(message, format!("{first}: shape [5, 100, 112], expected [5, 100, 120]"));
        let scales = "model.layers.0.self_attn.q_proj.weight_scale_inv";
        let blocks = json!({ "quantization_config": { "quant_method": "fp8", "weight_block_size": [64, 48] } });
        let message = said("tiny-qwen3-fp8", blocks);
        assert_eq!(message, format!("{scales}: shape [8, 5], expected [1], [256, 1] or [4, 4]"));
    }

    /// Of a matrix in FP8, which is made itself, another is made: GLM 4's queries, whose rows files have in another order.
    #[test]
    fn what_is_made_is_made_of_what_is_made() {
        use safetensors::{Dtype, tensor::TensorView as View};
        let name = "model.layers.0.self_attn.q_proj.weight";
        let plain = Weights::open(&fixture("tiny-glm4")).expect("the fixture");
        let shape = plain.get(name).expect("queries").shape.to_vec();
        let bytes: Vec<u8> = (0..shape.iter().product()).map(|i: usize| (i * 31 % 120) as u8).collect();
        let scale = 0.25f32.to_le_bytes();
        // By its definition, of whole exponents alone: eight numbers a power of two.
        let number = |byte: u8| match byte / 8 {
            0 => f32::from(byte) * 2f32.powi(-9),
            exponent => (1.0 + f32::from(byte % 8) / 8.0) * 2f32.powi(i32::from(exponent) - 7),
        };
        let wide: Vec<u8> = bytes.iter().flat_map(|b| half::bf16::from_f32(0.25 * number(*b)).to_le_bytes()).collect();
        let made = |instead: Vec<(&str, View<'_>)>| {
            let dir = tempfile::tempdir().expect("a temporary folder");
            fs::copy(fixture("tiny-glm4").join("config.json"), dir.path().join("config.json")).expect("a copy");
            let others = plain.names().filter(|other| *other != name).map(|name| {
                let view = plain.get(name).expect("its own name");
                (name.to_owned(), View::new(Dtype::BF16, view.shape.to_vec(), view.bytes).expect("as it was"))
            });
            let instead = instead.into_iter().map(|(name, view)| (name.to_owned(), view));
            let all = safetensors::serialize(others.chain(instead), None).expect("a checkpoint");
            fs::write(dir.path().join("model.safetensors"), all).expect("a file");
            let folder = ModelFolder::open(dir.path()).expect("a model");
            assert_eq!(folder.unused_tensors().expect("weights"), [""; 0]);
            folder.weights().expect("weights").expect(name, &shape).expect("made").bytes.to_vec()
        };
        let in_bf16 = made(vec![(name, View::new(Dtype::BF16, shape.clone(), &wide).expect("a matrix"))]);
        for suffix in fp8::SCALES {
            let scales = format!("{name}{suffix}");
            let in_fp8 = made(vec![
                (name, View::new(Dtype::F8_E4M3, shape.clone(), &bytes).expect("a matrix")),
                (&scales, View::new(Dtype::F32, vec![], &scale).expect("a number")),
            ]);
            assert!(in_fp8 == in_bf16 && in_fp8 != wide, "{suffix}");
        }
    }

    #[test]
    fn what_is_no_model_folder_is_refused_in_a_line() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let message = |path: &Path| ModelFolder::open(path).expect_err("refused").to_string();
        assert!(message(&dir.path().join("x")).ends_with("cannot read: no such file or directory"));
        assert!(message(dir.path()).ends_with(": no config.json"));
        let file = dir.path().join("config.json");
        fs::write(&file, "{").expect("a file");
        assert!(message(&file).contains("not a folder; a model is a folder with"));
        assert!(message(dir.path()).contains("not valid JSON: EOF while parsing"));
    }

    #[test]
    fn ids_beyond_the_models_vocabulary_are_refused() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let mut config = json::read_value(&fixture("tiny-qwen3").join("config.json")).expect("JSON");
        config["vocab_size"] = 50.into();
        fs::write(dir.path().join("config.json"), config.to_string()).expect("a file");
        fs::copy(fixture("tiny-qwen3").join("tokenizer.json"), dir.path().join("tokenizer.json")).expect("a copy");
        let folder = ModelFolder::open(dir.path()).expect("a config");
        let message = folder.encode("zebra").expect_err("out of range").to_string();
        assert!(message.starts_with("token id ") && message.ends_with("expected 0 to 49"), "{message}");
    }

    /// Writes `from`'s tensors with others beside them, each of one f32, as the checkpoint of the folder `to`. A name
    /// of `from` that ends with the first of `renamed` ends with the second instead.
    fn add_tensors(from: &Weights, to: &Path, prefix: &str, renamed: [&str; 2], others: &[&str]) {
        use safetensors::{Dtype, tensor::TensorView as View};
        let rename = |name: &str| match name.strip_suffix(renamed[0]) {
            Some(stem) => format!("{prefix}{stem}{}", renamed[1]),
            None => format!("{prefix}{name}"),
        };
        let old = from.names().map(|name| {
            let view = from.get(name).expect("its own name");
            assert_eq!(view.dtype, perpetua_shared::DType::Bf16);
            (rename(name), View::new(Dtype::BF16, view.shape.to_vec(), view.bytes).expect("as it was"))
        });
        let new = others.iter().map(|name| ((*name).to_owned(), View::new(Dtype::F32, vec![1], &[0; 4]).expect("one")));
        let bytes = safetensors::serialize(old.chain(new), None).expect("a checkpoint");
        fs::write(to.join("model.safetensors"), bytes).expect("a file");
    }

    #[test]
    fn tensors_that_no_network_reads_are_listed() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let unused = |preset: &str, prefix: &str, renamed, others: &[&str]| {
            let [whole, out] = ["whole", "out"].map(|part| dir.path().join(format!("{preset}-{prefix}{part}")));
            for out in [&whole, &out] {
                let go_on = &mut |_, _| std::ops::ControlFlow::Continue(());
                synth(SynthSource::Preset(preset), out, &SynthOptions::default(), go_on).expect("a model");
            }
            let whole = ModelFolder::open(&whole).expect("a model");
            assert_eq!(whole.unused_tensors().expect("weights"), [""; 0]);
            add_tensors(whole.weights().expect("weights"), &out, prefix, renamed, others);
            let folder = ModelFolder::open(&out).expect("the model");
            let unused = folder.unused_tensors().expect("weights");
            let spare = unused.iter().filter(|name| layout::is_spare(folder.config(), name)).count();
            (unused.into_iter().map(str::to_owned).collect::<Vec<_>>(), spare)
        };
        // What older versions of transformers saved, and a bias that the configuration does not have.
        let others = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.mlp.up_proj.bias"];
        assert_eq!(unused("tiny-qwen3", "", ["", ""], &others), (others.map(str::to_owned).to_vec(), 1));
        // As bert-base-uncased and all-MiniLM-L6-v2 have them; and a layer too many.
        let others = [
            "bert.embeddings.position_ids",
            "bert.encoder.layer.3.output.dense.bias",
            "bert.pooler.dense.bias",
            "bert.pooler.dense.weight",
            "cls.predictions.bias",
        ];
        let renamed = ["LayerNorm.weight", "LayerNorm.gamma"];
        assert_eq!(unused("tiny-bert", "bert.", renamed, &others), (others.map(str::to_owned).to_vec(), 4));
        let others = ["embeddings.position_ids", "pooler.dense.weight"];
        assert_eq!(unused("tiny-bert", "", ["", ""], &others), (others.map(str::to_owned).to_vec(), 2));
    }

    /// What a sentence model was trained with on top of it is named, and not missed where it is not there.
    #[test]
    fn a_sentence_models_head_is_nobodys() {
        for (name, prefix, head) in
            [("tiny-embedding", "model.", "lm_head.weight"), ("tiny-xlm-roberta", "roberta.", "lm_head.bias")]
        {
            let bare = ModelFolder::open(fixture(name)).expect(name);
            assert!(!bare.lacks_tensors(), "{name}");
            let spare = |folder: &ModelFolder| {
                let unused = folder.unused_tensors().expect("weights");
                assert!(unused.iter().all(|name| layout::is_spare(folder.config(), name)), "{unused:?}");
                unused.into_iter().map(str::to_owned).collect::<Vec<_>>()
            };
            let without: Vec<String> = spare(&bare).into_iter().map(|name| format!("{prefix}{name}")).collect();
            let dir = tempfile::tempdir().expect("a temporary folder");
            for file in ["config.json", "modules.json"] {
                fs::copy(fixture(name).join(file), dir.path().join(file)).expect("a copy");
            }
            fs::create_dir(dir.path().join("1_Pooling")).expect("a folder");
            fs::copy(fixture(name).join("1_Pooling/config.json"), dir.path().join("1_Pooling/config.json"))
                .expect("a copy");
            add_tensors(bare.weights().expect(name), dir.path(), prefix, ["", ""], &[head]);
            let headed = ModelFolder::open(dir.path()).expect(name);
            assert!(!headed.lacks_tensors(), "{name}");
            assert_eq!(spare(&headed), [&[head.to_owned()][..], &without].concat());
        }
    }

    #[test]
    fn who_sees_what_comes_after_takes_a_sentence_whole() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let open = |name: &str, change: &str, pooling: &str| {
            fs::create_dir_all(dir.path().join("1_Pooling")).expect("a folder");
            fs::copy(fixture(name).join("modules.json"), dir.path().join("modules.json")).expect("a copy");
            let config = fs::read_to_string(fixture(name).join("config.json")).expect("a file");
            fs::write(dir.path().join("config.json"), config.replacen('{', &format!("{{{change}"), 1)).expect("a file");
            let pooling = format!("{{\"pooling_mode\": \"{pooling}\"}}");
            fs::write(dir.path().join("1_Pooling/config.json"), pooling).expect("a file");
            ModelFolder::open(dir.path()).expect("a model")
        };
        for (name, change, pooling, expected) in [
            ("tiny-embedding", "", "lasttoken", false),
            ("tiny-embedding", "\"is_causal\": true,", "lasttoken", false),
            ("tiny-embedding", "", "mean", true),
            ("tiny-embedding", "\"is_causal\": false,", "lasttoken", true),
            ("tiny-xlm-roberta", "", "lasttoken", true),
        ] {
            assert_eq!(open(name, change, pooling).takes_whole(), expected, "{name}, {change}, {pooling}");
        }
        let config = fs::read_to_string(fixture("tiny-embedding").join("config.json")).expect("a file");
        let config = config.replacen('{', "{\"use_bidirectional_attention\": true,", 1);
        fs::write(dir.path().join("config.json"), config).expect("a file");
        let message = ModelFolder::open(dir.path()).expect_err("Gemma's").to_string();
        assert!(message.contains("use_bidirectional_attention: true is not supported"), "{message}");
        let bare = open("tiny-embedding", "\"is_causal\": false,", "mean");
        fs::remove_file(dir.path().join("modules.json")).expect("there");
        let text = ModelFolder::open(bare.dir()).expect("a model");
        let message = text.decoder().expect_err("not causal").to_string();
        assert!(message.contains("whose rows attend to those after them") && !message.contains('\n'), "{message}");
    }

    /// As the tokenizer and the weights are: a conversation renders it once a turn.
    #[test]
    fn a_chat_template_is_read_once() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
            fs::copy(fixture("tiny-qwen3").join(file), dir.path().join(file)).expect("a copy");
        }
        let folder = ModelFolder::open(dir.path()).expect("a model");
        let messages = [ChatMessage::new("user", "Hi")];
        let ids = folder.encode_chat(&messages).expect("renders");
        for file in ["tokenizer_config.json", "chat_template.jinja"] {
            fs::remove_file(dir.path().join(file)).expect("there");
        }
        assert_eq!(folder.encode_chat(&messages).expect("it is known"), ids);
    }

    /// A linear layer behind the pooling: its tensors are its folder's.
    #[test]
    fn linear_layers_behind_the_pooling() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let name = "tiny-embeddinggemma";
        for file in ["config.json", "model.safetensors", "modules.json", "1_Pooling/config.json"] {
            let to = dir.path().join(file);
            fs::create_dir_all(to.parent().expect("inside")).expect("a folder");
            fs::copy(fixture(name).join(file), to).expect("a copy");
        }
        let dense = |number: usize, change: serde_json::Value| {
            let folder = format!("{number}_Dense");
            fs::create_dir_all(dir.path().join(&folder)).expect("a folder");
            let mut config = json::read_value(&fixture(name).join(&folder).join("config.json")).expect("JSON");
            let changes = change.as_object().expect("keys").clone();
            config.as_object_mut().expect("keys").extend(changes);
            fs::write(dir.path().join(&folder).join("config.json"), config.to_string()).expect("a file");
        };
        dense(2, json!({}));
        dense(3, json!({}));
        let folder = ModelFolder::open(dir.path()).expect("a model");
        let layers = &folder.sentence_model().expect("of sentences").dense;
        let sizes: Vec<_> = layers.iter().map(|d| (d.in_features, d.out_features, d.has_bias)).collect();
        assert_eq!(sizes, [(96, 160, true), (160, 64, false)]);
        let message = folder.weights().expect_err("no file").to_string();
        assert!(message.contains("2_Dense") && message.contains("no model.safetensors"), "{message}");
        for number in [2, 3] {
            let file = format!("{number}_Dense/model.safetensors");
            fs::copy(fixture(name).join(&file), dir.path().join(&file)).expect("a copy");
        }
        let folder = ModelFolder::open(dir.path()).expect("a model");
        assert_eq!(folder.unused_tensors().expect("weights"), [""; 0]);
        assert!(folder.weights().expect("weights").contains("3_Dense.linear.weight"));
        for (change, expected) in [
            (json!({ "activation_function": "torch.nn.modules.activation.Tanh" }), "Tanh is not supported"),
            (json!({ "activation_function": null }), "Tanh is not supported"),
            (json!({ "in_features": 161 }), "in_features: 161, expected 160"),
            (json!({ "use_residual": true }), "use_residual: true is not supported"),
            (json!({ "module_input_name": "token_embeddings" }), "module_input_name"),
        ] {
            dense(3, change.clone());
            let found = ModelFolder::open(dir.path()).map(|_| ()).map_err(|error| error.to_string());
            assert!(found.as_ref().is_err_and(|message| message.contains(expected)), "{change}: {found:?}");
        }
    }

    #[test]
    fn a_sentence_models_parts_must_agree() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let out = dir.path().join("m");
        let go_on = &mut |_, _| std::ops::ControlFlow::Continue(());
        synth(SynthSource::Preset("tiny-bert"), &out, &SynthOptions::default(), go_on).expect("a model");
        let folder = ModelFolder::open(&out).expect("the model");
        assert_eq!((folder.encoder_prefix().expect("weights"), folder.max_tokens()), ("", 128));
        assert!(folder.decoder().expect_err("an encoder").to_string().contains("BertModel for text generation"));

        let pooling = out.join("1_Pooling/config.json");
        let text = fs::read_to_string(&pooling).expect("a file").replace("96", "97");
        fs::write(&pooling, text).expect("a file");
        let message = ModelFolder::open(&out).expect_err("97").to_string();
        assert!(message.contains("hidden_size: 96, expected 97"), "{message}");

        // The same folder without its modules is a plain BERT.
        fs::remove_file(out.join("modules.json")).expect("there");
        let plain = ModelFolder::open(&out).expect("a plain BERT");
        assert_eq!(plain.sentence_model().expect("an encoder").pooling, Pooling::Mean);
    }
}
