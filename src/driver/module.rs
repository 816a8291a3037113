//! PTX to cubin, cubin to module, module to function.
//!
//! Owns the use of the driver's JIT. Two ways lead from text to a module: [`Cubin::assemble`] gives
//! the bytes, which can be kept and loaded later by the same driver on the same kind of device;
//! with [`Module::from_ptx`] the driver assembles and loads at once. Both return the assembler's
//! log, and warn of the advisories in it. Invariant: the driver never gets an image whose own
//! headers point outside of it.
//!
//! Source: CUDA Driver API, "Module Management".

use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::context::Context;
use super::elf;
use super::error::{Error, Result};
use super::jit_log::{self, JitCall};
use super::launch::Signature;
use super::sys::{self, CUfunction, CUlinkState, CUmodule};

/// How the driver assembles PTX.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct JitOptions {
    /// Keep `.loc` lines, so that profilers show the source beside the machine code.
    pub line_info: bool,
    /// Optimisation level, 0 to 4; the driver's default is 4.
    pub optimization_level: Option<u8>,
    /// Most registers of a thread; without it, what the PTX and the device allow.
    pub max_regs: Option<u32>,
}

impl fmt::Display for JitOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line_info, optimization_level, max_regs } = self;
        write!(f, "line_info={line_info} level={optimization_level:?} max_regs={max_regs:?}")
    }
}

/// Machine code for one kind of device, and what the assembler said about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// The image: an ELF file.
    pub image: Vec<u8>,
    /// The assembler's information log: registers, spills, advisories.
    pub log: String,
}

impl Cubin {
    /// Assembles PTX for the context's device.
    ///
    /// # Errors
    /// `Jit` with the driver's log, `UnsupportedPtx` if the text is too new for the driver, `Nul`.
    pub fn assemble(context: &Context, ptx: &str, options: &JitOptions) -> Result<Self> {
        let text = c_string("the PTX text", ptx)?;
        let (api, driver) = (context.api(), context.driver());
        let _current = context.bind()?;
        let mut call = JitCall::new(options);
        let explain = |call: &JitCall, error| call.explain(error, driver, ptx);
        let mut state = std::ptr::null_mut();
        let (num, opts, values) = raw_parts(&mut call);
        // SAFETY: the arrays have this many entries and, with the logs, outlive the link state.
        unsafe { api.cuLinkCreate_v2(num, opts, values, &mut state) }
            .map_err(|error| explain(&call, error))?;
        let link = Link { context, state };
        let (data, bytes) = (text.as_ptr().cast_mut().cast(), text.as_bytes_with_nul().len());
        let (name, no_options) = (c"makaira".as_ptr(), std::ptr::null_mut());
        let (kind, no_values) = (sys::JIT_INPUT_PTX, std::ptr::null_mut());
        // SAFETY: the text is NUL-terminated, of this many bytes, and only read; no further
        // options.
        unsafe { api.cuLinkAddData_v2(state, kind, data, bytes, name, 0, no_options, no_values) }
            .map_err(|error| explain(&call, error))?;
        let (mut image, mut len) = (std::ptr::null_mut::<c_void>(), 0);
        // SAFETY: the driver writes an address and a length; the image belongs to the link state.
        unsafe { api.cuLinkComplete(state, &mut image, &mut len) }
            .map_err(|error| explain(&call, error))?;
        if image.is_null() {
            return Err(elf::refused("cuLinkComplete gave no image"));
        }
        // SAFETY: given by the driver for as long as the link state lives.
        let image = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), len) }.to_vec();
        drop(link);
        Ok(Self { image, log: call.info_log() })
    }

    /// The advisories in the log.
    pub fn advisories(&self) -> Vec<String> {
        jit_log::advisories(&self.log)
    }
}

/// A link that is going on.
struct Link<'c> {
    context: &'c Context,
    state: CUlinkState,
}

impl Drop for Link<'_> {
    fn drop(&mut self) {
        // SAFETY: made by us, not used after this.
        self.context.on_drop("a link state", |api| unsafe { api.cuLinkDestroy(self.state) });
    }
}

/// Code loaded into a context. Its functions keep it loaded.
#[derive(Clone, Debug)]
pub struct Module {
    inner: Arc<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    context: Context,
    raw: CUmodule,
    log: String,
}

// SAFETY: module handles may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: the driver locks; the handle does not change.
unsafe impl Sync for Loaded {}

impl Module {
    /// Assembles and loads in one step.
    ///
    /// # Errors
    /// Those of [`Cubin::assemble`].
    pub fn from_ptx(context: &Context, ptx: &str, options: &JitOptions) -> Result<Self> {
        let text = c_string("the PTX text", ptx)?;
        let _current = context.bind()?;
        let mut call = JitCall::new(options);
        let (num, opts, values) = raw_parts(&mut call);
        let mut raw = std::ptr::null_mut();
        // SAFETY: the text is NUL-terminated; the arrays have this many entries.
        unsafe {
            context.api().cuModuleLoadDataEx(&mut raw, text.as_ptr().cast(), num, opts, values)
        }
        .map_err(|error| call.explain(error, context.driver(), ptx))?;
        Ok(Self::of(context, raw, call.info_log()))
    }

    /// Loads machine code.
    ///
    /// # Errors
    /// `Jit` for an image that is damaged or for another device (codes 200 and 209).
    pub fn from_cubin(context: &Context, cubin: &Cubin) -> Result<Self> {
        elf::check(&cubin.image)?;
        let _current = context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: an ELF image whose headers stay within it; the driver copies it.
        unsafe { context.api().cuModuleLoadData(&mut raw, cubin.image.as_ptr().cast()) }?;
        Ok(Self::of(context, raw, cubin.log.clone()))
    }

    fn of(context: &Context, raw: CUmodule, log: String) -> Self {
        for advisory in jit_log::advisories(&log) {
            log::warn!("the driver's assembler advises: {advisory}");
        }
        Self { inner: Arc::new(Loaded { context: context.clone(), raw, log }) }
    }

    /// The assembler's information log.
    pub fn info_log(&self) -> &str {
        &self.inner.log
    }

    /// The C75xx advisories in that log: optimisations that the assembler gave up.
    pub fn advisories(&self) -> Vec<String> {
        jit_log::advisories(&self.inner.log)
    }

    /// The kernel of this name, loaded completely, so that its first launch does no work that a
    /// later one does not.
    ///
    /// # Errors
    /// `Call` with code 500 if there is none; `Nul`.
    pub fn function(&self, name: &str) -> Result<Function> {
        let c_name = c_string("the kernel's name", name)?;
        let Loaded { context, raw: module, .. } = &*self.inner;
        let api = context.api();
        let _current = context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver writes one handle; the module is alive; the name is NUL-terminated.
        unsafe { api.cuModuleGetFunction(&mut raw, *module, c_name.as_ptr()) }?;
        if api.has("cuFuncLoad") {
            // SAFETY: the function is of a module that is alive.
            unsafe { api.cuFuncLoad(raw) }?;
        }
        let attrs = FunctionAttrs::query(context, raw)?;
        let attribute = |attribute| function_attribute(context, raw, attribute);
        Ok(Function {
            max_dynamic_smem_bytes: AtomicU32::new(attribute(sys::FUNC_MAX_DYNAMIC_SMEM_BYTES)?),
            raising: Mutex::new(()),
            accepted: OnceLock::new(),
            module: self.clone(),
            raw,
            name: name.to_owned(),
            attrs,
        })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: loaded by us; no function of it is left.
        self.context.on_drop("a module", |api| unsafe { api.cuModuleUnload(self.raw) });
    }
}

/// What the assembler made of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionAttrs {
    /// Registers of a thread.
    pub num_regs: u32,
    /// Local memory of a thread in bytes: spills and stack.
    pub local_bytes: u32,
    /// Statically declared shared memory, in bytes.
    pub static_smem_bytes: u32,
    /// Constant memory, in bytes.
    pub const_bytes: u32,
    /// Most threads in a CTA of this kernel.
    pub threads_per_cta: u32,
    /// PTX ISA it was written for, major times ten plus minor.
    pub ptx_version: u32,
    /// Compute capability it was assembled for, times ten.
    pub binary_version: u32,
}

impl FunctionAttrs {
    fn query(context: &Context, raw: CUfunction) -> Result<Self> {
        let get = |attribute| function_attribute(context, raw, attribute);
        Ok(Self {
            num_regs: get(sys::FUNC_NUM_REGS)?,
            local_bytes: get(sys::FUNC_LOCAL_BYTES)?,
            static_smem_bytes: get(sys::FUNC_STATIC_SMEM_BYTES)?,
            const_bytes: get(sys::FUNC_CONST_BYTES)?,
            threads_per_cta: get(sys::FUNC_MAX_THREADS_PER_CTA)?,
            ptx_version: get(sys::FUNC_PTX_VERSION)?,
            binary_version: get(sys::FUNC_BINARY_VERSION)?,
        })
    }
}

/// A kernel, ready to launch. See `launch.rs` for launching it.
pub struct Function {
    module: Module,
    pub(super) raw: CUfunction,
    name: String,
    attrs: FunctionAttrs,
    max_dynamic_smem_bytes: AtomicU32,
    /// Held while the limit is raised, so that the driver's value and ours cannot part.
    raising: Mutex<()>,
    /// The arguments that the driver took once.
    pub(super) accepted: OnceLock<Signature>,
}

// SAFETY: function handles may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: the driver locks; the rest is atomic or does not change.
unsafe impl Sync for Function {}

impl Function {
    /// Name of the PTX entry.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the assembler made of it.
    pub fn attrs(&self) -> &FunctionAttrs {
        &self.attrs
    }

    /// The module that the kernel is in.
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// The context that the kernel is loaded in.
    #[inline]
    pub fn context(&self) -> &Context {
        &self.module.inner.context
    }

    /// Dynamic shared memory that a launch may ask for now, in bytes.
    #[inline]
    pub fn max_dynamic_smem_bytes(&self) -> u32 {
        self.max_dynamic_smem_bytes.load(Ordering::Relaxed)
    }

    /// Raises the dynamic shared memory that a launch may ask for; never lowers it.
    ///
    /// # Errors
    /// `Limit` beyond what the device can give one CTA, less what the kernel declares statically.
    pub fn allow_dynamic_smem(&self, bytes: u32) -> Result<()> {
        let most = self.context().info().smem_per_cta_bytes;
        let limit = most.saturating_sub(self.attrs.static_smem_bytes);
        if bytes > limit {
            return Err(Error::Limit {
                what: "dynamic shared memory of a CTA, in bytes",
                requested: bytes.into(),
                limit: limit.into(),
                remedy: "choose a configuration with fewer stages or a smaller tile",
            });
        }
        let _guard = self.raising.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if bytes > self.max_dynamic_smem_bytes() {
            self.set_attribute(sys::FUNC_MAX_DYNAMIC_SMEM_BYTES, bytes as i32)?;
            self.max_dynamic_smem_bytes.store(bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Allows clusters of more than the portable eight CTAs.
    ///
    /// # Errors
    /// Those of the driver call, on devices without clusters.
    pub fn allow_non_portable_clusters(&self) -> Result<()> {
        self.set_attribute(sys::FUNC_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    }

    fn set_attribute(&self, attribute: i32, value: i32) -> Result<()> {
        let _current = self.context().bind()?;
        // SAFETY: the function is alive.
        unsafe { self.context().api().cuFuncSetAttribute(self.raw, attribute, value) }
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function({}, {:?})", self.name, self.attrs)
    }
}

fn function_attribute(context: &Context, raw: CUfunction, attribute: i32) -> Result<u32> {
    let mut value = 0;
    // SAFETY: the driver writes one int; the function is alive.
    unsafe { context.api().cuFuncGetAttribute(&mut value, attribute, raw) }?;
    Ok(value.max(0) as u32)
}

fn raw_parts(call: &mut JitCall) -> (u32, *mut i32, *mut *mut c_void) {
    (call.options.len() as u32, call.options.as_mut_ptr(), call.values.as_mut_ptr())
}

fn c_string(what: &'static str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|error| Error::Nul { what, position: error.nul_position() })
}
