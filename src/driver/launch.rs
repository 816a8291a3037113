//! Launching a kernel: arguments, shape, limits.
//!
//! A launch checks the shape against the device and the kernel before the driver sees it, neither
//! allocates nor waits, and returns what the driver says. Arguments are packed as PTX lays out
//! parameters: each at the next multiple of its alignment, in the order of the entry's declaration.
//!
//! Launching is no `unsafe` call: a kernel reaches the memory that its arguments name, and whoever
//! made an address from a raw one vouched for it ([`DevicePtr::from_raw`]).
//!
//! Source: CUDA Driver API, "Execution Control", "Occupancy".

use std::ffi::c_void;

use super::buffer::DevicePtr;
use super::error::{Error, Placed, Result};
use super::module::Function;
use super::stream::StreamRef;
use super::sys::{self, LaunchAttribute};

/// Room for arguments, in 8-byte words. As many arguments of any size fit.
const ARG_WORDS: usize = 64;

/// Sizes of a list's arguments in bytes, zeros behind the last. Offsets follow from them.
pub(super) type ArgSizes = [u8; ARG_WORDS];

/// The alignment of an argument: its size, except that of a tensor map.
const fn alignment(bytes: usize) -> usize {
    if bytes < MAX_ALIGNMENT { bytes } else { MAX_ALIGNMENT }
}

/// The alignment of a tensor map, the largest of an argument, in bytes.
const MAX_ALIGNMENT: usize = align_of::<super::tensor_map::TensorMap>();

/// A value that can be a kernel parameter.
pub trait KernelArg: bytemuck::NoUninit {}

impl KernelArg for u8 {}
impl KernelArg for u16 {}
impl KernelArg for i32 {}
impl KernelArg for u32 {}
impl KernelArg for i64 {}
impl KernelArg for u64 {}
impl KernelArg for f32 {}
impl KernelArg for f64 {}
impl KernelArg for DevicePtr {}

/// The arguments of a launch, packed in place.
///
/// ```
/// use makaira::driver::{Args, DevicePtr};
/// let args = Args::new().with(DevicePtr::NULL).with(7_u32).with(DevicePtr::NULL);
/// assert_eq!(args.size_bytes(), 24);
/// ```
#[derive(Clone, Debug)]
pub struct Args {
    words: [u64; ARG_WORDS],
    sizes: ArgSizes,
    /// How many arguments there are, also those beyond the room.
    count: usize,
    /// Bytes that the arguments take, also those beyond the room.
    bytes: usize,
}

impl Args {
    /// No arguments.
    pub const fn new() -> Self {
        Self { words: [0; ARG_WORDS], sizes: [0; ARG_WORDS], count: 0, bytes: 0 }
    }

    /// Appends an argument.
    pub fn push<A: KernelArg>(&mut self, arg: A) {
        const { assert!(alignment(size_of::<A>()) == align_of::<A>()) };
        let start = self.bytes.next_multiple_of(align_of::<A>());
        self.bytes = start + size_of::<A>();
        let room: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        // What does not fit is reported by the launch.
        if let Some(place) = room.get_mut(start..self.bytes) {
            place.copy_from_slice(bytemuck::bytes_of(&arg));
        }
        if let Some(size) = self.sizes.get_mut(self.count) {
            *size = size_of::<A>() as u8;
        }
        self.count += 1;
    }

    /// Appends an argument, in a chain.
    #[must_use]
    pub fn with<A: KernelArg>(mut self, arg: A) -> Self {
        self.push(arg);
        self
    }

    /// Size of the packed list, in bytes.
    pub fn size_bytes(&self) -> usize {
        self.bytes
    }
}

impl Default for Args {
    fn default() -> Self {
        Self::new()
    }
}

/// How many CTAs of how many threads, with how much shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// CTAs per dimension.
    pub grid: [u32; 3],
    /// Threads of a CTA per dimension.
    pub threads: [u32; 3],
    /// Dynamic shared memory of a CTA, in bytes.
    pub dynamic_smem_bytes: u32,
}

impl LaunchShape {
    /// A grid and CTAs along x.
    pub const fn linear(ctas: u32, threads: u32, dynamic_smem_bytes: u32) -> Self {
        Self { grid: [ctas, 1, 1], threads: [threads, 1, 1], dynamic_smem_bytes }
    }
}

/// What a launch asks for beyond its shape. Anything but the default needs CUDA 11.8 or newer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchAttrs {
    /// CTAs of a cluster per dimension.
    pub cluster: Option<[u32; 3]>,
    /// The kernel may start before the previous one on the stream ends (programmatic dependent
    /// launch); it must wait by itself before it reads that kernel's results.
    pub overlap_previous: bool,
    /// All CTAs must be resident at once, so that they may wait for each other.
    pub cooperative: bool,
}

impl LaunchAttrs {
    fn entries(&self) -> ([LaunchAttribute; 3], u32) {
        let mut entries = [LaunchAttribute::IGNORE; 3];
        let mut count = 0;
        let mut add = |id, words| {
            entries[count] = LaunchAttribute::of_words(id, words);
            count += 1;
        };
        if let Some(cluster) = self.cluster {
            add(sys::LAUNCH_CLUSTER_DIMENSION, cluster);
        }
        if self.overlap_previous {
            add(sys::LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION, [1, 0, 0]);
        }
        if self.cooperative {
            add(sys::LAUNCH_COOPERATIVE, [1, 0, 0]);
        }
        (entries, count as u32)
    }
}

impl Function {
    /// Enqueues the kernel.
    ///
    /// # Errors
    /// `Limit` if the shape is empty or exceeds device or kernel, `Argument` for the first argument
    /// that is not the kernel's parameter (where the driver can tell, CUDA 12.4), `Call` if the
    /// driver refuses; it alone notices that arguments are missing at the end. Errors of the running kernel come out of a later call that waits for it.
    #[inline]
    pub fn launch(&self, stream: StreamRef<'_>, shape: &LaunchShape, args: &Args) -> Result<()> {
        self.check(shape, args)?;
        let context = self.context();
        let _current = context.bind()?;
        let mut bytes = args.bytes;
        let mut extra = extra(args, &mut bytes);
        let LaunchShape { grid: [gx, gy, gz], threads: [tx, ty, tz], dynamic_smem_bytes } = *shape;
        // SAFETY: function and stream are alive; `extra` names the packed arguments and their size,
        // and the driver copies them before it returns.
        let launched = unsafe {
            let none = std::ptr::null_mut();
            let (function, extra) = (self.raw, extra.as_mut_ptr());
            context.api().cuLaunchKernel(
                function,
                gx,
                gy,
                gz,
                tx,
                ty,
                tz,
                dynamic_smem_bytes,
                stream.raw,
                none,
                extra,
            )
        };
        self.remember(args, launched)
    }

    /// Enqueues the kernel with attributes.
    ///
    /// # Errors
    /// Those of [`launch`](Self::launch); `MissingSymbol` before CUDA 11.8.
    pub fn launch_with(
        &self,
        stream: StreamRef<'_>,
        shape: &LaunchShape,
        attrs: &LaunchAttrs,
        args: &Args,
    ) -> Result<()> {
        if *attrs == LaunchAttrs::default() {
            return self.launch(stream, shape, args);
        }
        self.check(shape, args)?;
        let context = self.context();
        let _current = context.bind()?;
        let mut bytes = args.bytes;
        let mut extra = extra(args, &mut bytes);
        let (entries, num_attrs) = attrs.entries();
        let config = config(shape, stream, &entries, num_attrs);
        let none = std::ptr::null_mut();
        // SAFETY: as for `launch`; the configuration and its attributes outlive the call.
        let launched =
            unsafe { context.api().cuLaunchKernelEx(&config, self.raw, none, extra.as_mut_ptr()) };
        self.remember(args, launched)
    }

    /// How many CTAs of this kernel fit on one SM.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn ctas_per_sm(&self, threads: u32, dynamic_smem_bytes: u32) -> Result<u32> {
        let context = self.context();
        let _current = context.bind()?;
        let mut count = 0;
        let (threads, smem) = (threads as i32, dynamic_smem_bytes as usize);
        // SAFETY: the driver writes one int; the function is alive.
        unsafe {
            let api = context.api();
            api.cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut count, self.raw, threads, smem)
        }?;
        Ok(count.max(0) as u32)
    }

    /// How many clusters of this kernel fit on the device.
    ///
    /// # Errors
    /// `MissingSymbol` before CUDA 11.8; those of the driver call.
    pub fn clusters_on_device(&self, shape: &LaunchShape, attrs: &LaunchAttrs) -> Result<u32> {
        let context = self.context();
        let _current = context.bind()?;
        let (entries, num_attrs) = attrs.entries();
        let config = config(shape, StreamRef::DEFAULT, &entries, num_attrs);
        let mut count = 0;
        // SAFETY: the driver writes one int; function, configuration and attributes outlive the
        // call.
        unsafe { context.api().cuOccupancyMaxActiveClusters(&mut count, self.raw, &config) }?;
        Ok(count.max(0) as u32)
    }

    /// Refuses what the device or the kernel cannot do, before the driver is called.
    #[inline]
    fn check(&self, shape: &LaunchShape, args: &Args) -> Result<()> {
        let info = self.context().info();
        let per_dimension = |what, sizes: &[u32; 3], limits: &[u32; 3]| {
            let over =
                sizes.iter().zip(limits).find(|(size, limit)| !(1..=**limit).contains(*size));
            over.map_or(Ok(()), |(size, limit)| {
                Err(limit_error(
                    what,
                    (*size).into(),
                    (*limit).into(),
                    "use at least 1 and at most the limit",
                ))
            })
        };
        per_dimension("grid size in one dimension, in CTAs", &shape.grid, &info.grid_limit)?;
        per_dimension("CTA size in one dimension, in threads", &shape.threads, &info.cta_limit)?;
        let threads: u64 = shape.threads.iter().map(|size| u64::from(*size)).product();
        let most = info.threads_per_cta.min(self.attrs().threads_per_cta).into();
        if threads > most {
            let remedy = "launch with the thread count that the kernel was built for";
            return Err(limit_error("threads of a CTA", threads, most, remedy));
        }
        let (smem, allowed) = (shape.dynamic_smem_bytes, self.max_dynamic_smem_bytes());
        if smem > allowed {
            let remedy = "call allow_dynamic_smem first, or choose a smaller configuration";
            let what = "dynamic shared memory of a CTA, in bytes";
            return Err(limit_error(what, smem.into(), allowed.into(), remedy));
        }
        let remedy = "pass large arguments through memory";
        let room = [
            ("kernel arguments, in bytes", args.bytes, ARG_WORDS * 8),
            ("kernel arguments", args.count, ARG_WORDS),
        ];
        for (what, requested, limit) in room {
            if requested > limit {
                return Err(limit_error(what, requested as u64, limit as u64, remedy));
            }
        }
        match self.accepted.get() {
            Some(sizes) if *sizes == args.sizes => Ok(()),
            _ => self.check_args(args),
        }
    }

    /// Compares the arguments with what the driver says of the kernel's parameters. It is asked for
    /// as many as there are arguments and never beyond the last parameter, unless an argument is
    /// too many: tools that watch the driver's calls report such a question as an error.
    #[cold]
    fn check_args(&self, args: &Args) -> Result<()> {
        let api = self.context().api();
        if !api.has("cuFuncGetParamInfo") {
            return Ok(());
        }
        let _current = self.context().bind()?;
        let mut end = 0_usize;
        for (index, size) in args.sizes[..args.count].iter().enumerate() {
            let size = usize::from(*size);
            let given = Placed { offset: end.next_multiple_of(alignment(size)), bytes: size };
            let mut declared = Placed { offset: 0, bytes: 0 };
            let Placed { offset, bytes } = &mut declared;
            // SAFETY: the driver writes two sizes, or refuses an index beyond the last one.
            let known = unsafe { api.cuFuncGetParamInfo(self.raw, index, offset, bytes) };
            let declared = known.is_ok().then_some(declared);
            if declared != Some(given) {
                return Err(Error::Argument { kernel: self.name().into(), index, given, declared });
            }
            end = given.offset + given.bytes;
        }
        Ok(())
    }

    /// Keeps the shape of the first list that the driver took, so that it need not be compared again.
    #[inline]
    fn remember(&self, args: &Args, launched: Result<()>) -> Result<()> {
        if launched.is_ok() && self.accepted.get().is_none() {
            // Another thread may have been first: one list is as good as another.
            let _ = self.accepted.set(args.sizes);
        }
        launched
    }
}

#[cold]
fn limit_error(what: &'static str, requested: u64, limit: u64, remedy: &'static str) -> Error {
    Error::Limit { what, requested, limit, remedy }
}

/// The array by which a launch names one packed buffer instead of a pointer per argument.
#[inline]
fn extra(args: &Args, bytes: &mut usize) -> [*mut c_void; 5] {
    [
        sys::LAUNCH_PARAM_BUFFER_POINTER,
        args.words.as_ptr().cast_mut().cast(),
        sys::LAUNCH_PARAM_BUFFER_SIZE,
        std::ptr::from_mut(bytes).cast(),
        sys::LAUNCH_PARAM_END,
    ]
}

fn config(
    shape: &LaunchShape,
    stream: StreamRef<'_>,
    entries: &[LaunchAttribute; 3],
    num_attrs: u32,
) -> sys::LaunchConfig {
    sys::LaunchConfig {
        grid: shape.grid,
        threads: shape.threads,
        smem_bytes: shape.dynamic_smem_bytes,
        stream: stream.raw,
        attrs: entries.as_ptr(),
        num_attrs,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_packed_at_multiples_of_their_size() {
        // SAFETY: never dereferenced.
        let ptr = unsafe { DevicePtr::from_raw(0x1122_3344_5566_7788) };
        let args = Args::new().with(0xaa_u8).with(0xbbcc_u16).with(5_u32).with(7_i32).with(ptr);
        let bytes: &[u8] = bytemuck::cast_slice(&args.words);
        assert_eq!(args.size_bytes(), 24);
        assert_eq!(bytes[0], 0xaa);
        assert_eq!(bytes[2..4], 0xbbcc_u16.to_le_bytes());
        assert_eq!(bytes[4..8], 5_u32.to_le_bytes());
        assert_eq!(bytes[8..12], 7_i32.to_le_bytes());
        assert_eq!(bytes[16..24], 0x1122_3344_5566_7788_u64.to_le_bytes());
    }

    #[test]
    fn attributes_take_the_layout_of_the_header() {
        let attrs =
            LaunchAttrs { cluster: Some([2, 3, 4]), overlap_previous: true, cooperative: true };
        let (entries, count) = attrs.entries();
        assert_eq!(count, 3);
        assert_eq!(entries.map(|entry| entry.id), [4, 6, 2]);
        let words: &[u32] = bytemuck::cast_slice(&entries[0].value);
        assert_eq!(words[..4], [2, 3, 4, 0]);
        assert_eq!(bytemuck::cast_slice::<u64, u32>(&entries[1].value)[0], 1);
        assert_eq!(LaunchAttrs::default().entries().1, 0);
    }

    #[test]
    fn arguments_beyond_the_room_are_counted_not_written() {
        let mut args = Args::new();
        for value in 0..ARG_WORDS as u64 + 3 {
            args.push(value);
        }
        assert_eq!(args.size_bytes(), (ARG_WORDS + 3) * 8);
        assert_eq!(args.words[ARG_WORDS - 1], ARG_WORDS as u64 - 1);
    }
}
